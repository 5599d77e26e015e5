use super::*;
use proptest::prelude::*;

fn header() -> Header {
    let mut header = Header::new("demo", 8, 3);
    header.settings.insert("seed".to_owned(), "7".to_owned());
    header
}

fn record(pass: u64, position: u64, layer: u32, ids: &[u32]) -> Record {
    let weights = ids.iter().map(|id| 0.1 + *id as f32).collect();
    Record { pass, phase: Phase::Prefill, position, layer, ids: ids.to_vec(), weights, resident: None }
}

fn written(records: &[Record]) -> Vec<u8> {
    let mut writer = RouteWriter::new(Vec::new(), header()).unwrap();
    records.iter().for_each(|record| writer.write(record).unwrap());
    writer.finish().unwrap()
}

const HEAD: &str =
    r#"{"format":"forebay-routes","version":2,"model":"m","experts":8,"top_k":2,"settings":{}}"#;

fn error_of(text: &str) -> String {
    read_routes(text.as_bytes()).unwrap_err().to_string()
}

/// The format as the documentation has it, written by hand.
#[test]
fn a_file_by_hand() {
    let text = format!(
        "{HEAD}\n{}\n{}\n{}\n{}\n",
        r#"{"pass":0,"phase":"prefill","position":0,"layer":1,"ids":[7,3],"weights":[0.5,0.25]}"#,
        r#"{"pass":0,"phase":"prefill","position":1,"layer":1,"ids":[3,2],"weights":[0.5,0.25],"resident":[2]}"#,
        r#"{"pass":0,"phase":"prefill","position":0,"layer":4,"ids":[0],"weights":[1],"resident":[]}"#,
        r#"{"pass":1,"phase":"decode","position":2,"layer":1,"ids":[7,3],"weights":[0.5,0.25]}"#,
    );
    let mut resident = Vec::new();
    let (header, routes) =
        read_routes_seen(text.as_bytes(), &mut |record| resident.push(record.resident.clone())).unwrap();
    assert_eq!(resident, [None, Some(vec![2]), Some(vec![]), None]);
    assert_eq!((header.model.as_str(), routes.experts, routes.top_k), ("m", 8, 2));
    let union =
        |experts: &[u32], uses: &[u32], rows| Union { experts: experts.to_vec(), uses: uses.to_vec(), rows };
    let first = vec![union(&[7, 3, 2], &[1, 2, 1], 2), union(&[7, 3], &[1, 1], 1)];
    assert_eq!(routes.layers, [first, vec![union(&[0], &[1], 1)]]);
}

#[test]
fn what_is_wrong_is_named() {
    let line =
        |fields: &str| error_of(&format!("{HEAD}\n{{\"phase\":\"decode\",\"position\":0,{fields}}}\n"));
    for (fields, want) in [
        (r#""pass":0,"layer":0,"ids":[8],"weights":[1]"#, "line 2 of the route trace: expert 8 of 8"),
        (r#""pass":0,"layer":0,"ids":[1,1],"weights":[1,1]"#, "expert 1 twice"),
        (r#""pass":0,"layer":0,"ids":[],"weights":[]"#, "0 experts; 1 to 2"),
        (r#""pass":0,"layer":0,"ids":[1,2,3],"weights":[1,1,1]"#, "3 experts; 1 to 2"),
        (r#""pass":0,"layer":0,"ids":[1],"weights":[]"#, "1 experts and 0 weights"),
        (r#""pass":0,"layer":0,"ids":[1],"weights":[1e39]"#, "line 2"),
        (r#""pass":0,"layer":0,"ids":[1],"weights":[1],"resident":[2]"#, "expert 2 in memory"),
        (r#""pass":0,"layer":0,"ids":[1],"weights":[1],"resident":[1,1]"#, "expert 1 twice"),
        (r#""pass":0,"layer":4096,"ids":[1],"weights":[1]"#, "layer 4096"),
        (r#""pass":-1,"layer":0,"ids":[1],"weights":[1]"#, "line 2"),
        (r#""pass":0,"layer":0,"ids":[1],"weights":[1],"extra":0"#, "extra"),
    ] {
        let error = line(fields);
        assert!(error.contains(want), "{fields}: {error}");
    }
    let place = |pass, layer| {
        format!(r#"{{"pass":{pass},"phase":"decode","position":0,"layer":{layer},"ids":[1],"weights":[1]}}"#)
    };
    assert!(error_of(&format!("{HEAD}\n{}\n{}\n", place(1, 0), place(0, 0))).contains("pass 0 after pass 1"));
    assert!(error_of(&format!("{HEAD}\n{}\n{}\n", place(0, 2), place(0, 1))).contains("line 3"));
    assert!(error_of("").contains("empty"));
    assert!(error_of(&HEAD.replace(":2,\"model", ":1,\"model")).contains("version 1"));
    assert!(error_of(&HEAD.replace("forebay-routes", "other")).contains("other"));
    assert!(error_of(&HEAD.replace("\"top_k\":2", "\"top_k\":9")).contains("9 of 8"));
    assert!(error_of(&HEAD.replace("\"experts\":8", "\"experts\":99999999999")).contains("experts"));
    assert!(matches!(
        read_routes(format!("{HEAD}\n{}", " ".repeat(MAX_LINE + 9)).as_bytes()),
        Err(RouteFileError::LongLine { line: 2 })
    ));
}

/// 400 kB of lines that ask for 2 GB of counters.
#[test]
fn a_small_file_is_not_counted_at_length() {
    let head = HEAD.replace("\"experts\":8", "\"experts\":65536");
    let line = |layer: u32| {
        format!(r#"{{"pass":0,"phase":"decode","position":0,"layer":{layer},"ids":[65535],"weights":[1]}}"#)
    };
    let of = |layers: u32| {
        let lines: Vec<String> = (0..layers).map(line).collect();
        read_routes(format!("{head}\n{}\n", lines.join("\n")).as_bytes())
    };
    assert!(matches!(of(4096), Err(RouteFileError::TooWide { layers: 4096, selections: 4096, .. })));
    let (_, routes) = of(16).unwrap();
    assert_eq!(routes.counts().iter().map(Vec::len).sum::<usize>(), 16 * 65536);
    assert_eq!(routes.distinct(1), Some(1.0));
}

#[test]
fn a_writer_refuses_what_a_reader_would() {
    let mut writer = RouteWriter::new(Vec::new(), header()).unwrap();
    writer.write(&record(3, 0, 0, &[1])).unwrap();
    for bad in [record(2, 0, 0, &[1]), record(3, 0, 0, &[8]), record(3, 0, 0, &[1, 1])] {
        assert!(matches!(writer.write(&bad), Err(RouteFileError::Unfit { .. })));
    }
    assert!(RouteWriter::new(Vec::new(), Header::new("m", 0, 1)).is_err());
}

/// A disk that is full from the start: nothing is lost silently.
#[test]
fn a_full_disk_is_an_error_at_the_end_at_the_latest() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut writer = RouteWriter::new(Full, header()).unwrap();
    writer.write(&record(0, 0, 0, &[1])).unwrap();
    assert!(matches!(writer.finish(), Err(RouteFileError::Io(_))));
}

fn records() -> impl Strategy<Value = Vec<Record>> {
    let ids = prop::sample::subsequence((0u32..8).collect::<Vec<_>>(), 1..=3).prop_shuffle();
    let weight = prop::num::f32::NORMAL | prop::num::f32::ZERO | prop::num::f32::SUBNORMAL;
    let one = (0u64..3, any::<u64>(), 0u32..9, ids, prop::collection::vec(weight, 3), 0usize..5);
    prop::collection::vec(one, 0..20).prop_map(|parts| {
        let mut pass = 0;
        let phases = [Phase::Prefill, Phase::Decode, Phase::Draft, Phase::Absorb, Phase::Verify];
        let record =
            |(step, position, layer, ids, mut weights, phase): (u64, u64, u32, Vec<u32>, Vec<f32>, usize)| {
                pass += step;
                weights.truncate(ids.len());
                let resident = (layer % 2 == 0).then(|| ids[..ids.len() / 2].to_vec());
                Record { pass, phase: phases[phase], position, layer, ids, weights, resident }
            };
        parts.into_iter().map(record).collect()
    })
}

proptest! {
    #[test]
    fn records_come_back_bit_for_bit(records in records()) {
        let bytes = written(&records);
        let mut reader = RouteReader::new(bytes.as_slice()).unwrap();
        prop_assert_eq!(reader.header(), &header());
        for record in &records {
            let found = reader.next_record().unwrap().unwrap();
            let bits = |record: &Record| record.weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&found), bits(record));
            prop_assert_eq!(&found, record);
        }
        prop_assert_eq!(reader.next_record().unwrap(), None);
    }

    #[test]
    fn damage_is_an_error_or_another_valid_file(records in records(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = written(&records);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok((header, routes)) = read_routes(bytes.as_slice()) {
            prop_assert!(routes.layers.iter().flatten().flat_map(|u| &u.experts).all(|e| (*e as usize) < header.experts));
        }
        let _ = read_routes(&bytes[..at]);
    }
}
