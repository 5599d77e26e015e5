//! Patterns that have to hold at once for one text, wherever in a schema they come from: beside each other, through
//! `allOf` and `$ref`, or for one property of several objects. Whether a text has them all takes a time that doubles
//! with each, before any limit of the compiler is looked at.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

/// Most patterns and formats for one text.
const MOST: usize = 4;
/// Most schemas that are looked at, one that is part of several combinations as often.
const MOST_WORK: usize = 400_000;

/// What is wrong, and the JSON pointer of the schema where it is.
pub(crate) fn fault(root: &Value) -> Option<(String, String)> {
    let mut walk = Walk { root, steps: Vec::new(), open: Vec::new(), seen: HashSet::new(), work: 0 };
    let place = walk.place(None, ("", Step::None), root);
    walk.join([place]);
    while let Some(joined) = walk.open.pop() {
        if let Some((at, reason)) = walk.look(joined) {
            return Some((walk.pointer(at), reason));
        }
    }
    None
}

/// A schema and how it was come to.
#[derive(Clone, Copy)]
struct Place<'a> {
    at: usize,
    schema: &'a Value,
}

/// Schemas that hold at once.
#[derive(Clone, Default)]
struct Joined<'a> {
    all: Vec<Place<'a>>,
    /// Lists of which one holds too.
    choices: Vec<(Place<'a>, &'static str)>,
    members: HashSet<usize>,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    None,
    Name(&'a str),
    Number(usize),
}

struct Walk<'a> {
    root: &'a Value,
    /// For every place the one it is in, a keyword, and which of those behind it.
    steps: Vec<(Option<usize>, &'static str, Step<'a>)>,
    open: Vec<Joined<'a>>,
    /// Combinations that were looked at, by the addresses of their schemas.
    seen: HashSet<Vec<usize>>,
    work: usize,
}

impl<'a> Walk<'a> {
    fn place(
        &mut self,
        parent: Option<usize>,
        (keyword, step): (&'static str, Step<'a>),
        schema: &'a Value,
    ) -> Place<'a> {
        self.steps.push((parent, keyword, step));
        Place { at: self.steps.len() - 1, schema }
    }

    fn pointer(&self, at: usize) -> String {
        let mut steps = Vec::new();
        let mut next = Some(at);
        while let Some(at) = next {
            let (parent, keyword, step) = self.steps[at];
            match step {
                Step::None => steps.push(keyword.to_owned()),
                Step::Name(name) => steps.push(format!("{keyword}/{}", crate::schema::step(name))),
                Step::Number(number) => steps.push(format!("{keyword}/{number}")),
            }
            next = parent;
        }
        steps.reverse();
        format!("#{}", steps.join("/"))
    }

    /// To be looked at: what holds together with `places`.
    fn join(&mut self, places: impl IntoIterator<Item = Place<'a>>) {
        let mut joined = Joined::default();
        for place in places {
            self.add(&mut joined, place);
        }
        self.open.push(joined);
    }

    /// Adds a schema, and what it asks for besides.
    fn add(&mut self, joined: &mut Joined<'a>, place: Place<'a>) {
        let mut open = vec![place];
        while let Some(place) = open.pop() {
            let Value::Object(schema) = place.schema else { continue };
            self.work += 1;
            if self.work > MOST_WORK || !joined.members.insert(std::ptr::from_ref(place.schema).addr()) {
                continue;
            }
            joined.all.push(place);
            if let Some(target) = schema.get("$ref").and_then(|name| self.target(name)) {
                open.push(Place { at: place.at, schema: target });
            }
            let parts: Vec<_> = list(schema, "allOf").collect();
            for (number, part) in parts.into_iter().rev() {
                open.push(self.place(Some(place.at), ("allOf", Step::Number(number)), part));
            }
            for keyword in ["anyOf", "oneOf"] {
                if schema.get(keyword).is_some_and(Value::is_array) {
                    joined.choices.push((place, keyword));
                }
            }
        }
    }

    /// What a reference leads to, if it is a plain JSON pointer into the whole.
    fn target(&self, name: &Value) -> Option<&'a Value> {
        self.root.pointer(name.as_str()?.strip_prefix('#')?)
    }

    /// Counts the patterns of schemas that hold at once, and goes on to their parts.
    fn look(&mut self, mut joined: Joined<'a>) -> Option<(usize, String)> {
        let first = joined.all.first()?.at;
        if self.work > MOST_WORK {
            let reason = "its parts can be combined in too many ways; use fewer choices (anyOf, oneOf) that hold together";
            return Some((first, reason.to_owned()));
        }
        if let Some((place, keyword)) = joined.choices.pop() {
            let Value::Object(schema) = place.schema else { return None };
            for (number, part) in list(schema, keyword) {
                let mut chosen = joined.clone();
                self.work += chosen.all.len();
                let part = self.place(Some(place.at), (keyword, Step::Number(number)), part);
                self.add(&mut chosen, part);
                self.open.push(chosen);
            }
            return None;
        }
        let mut key: Vec<usize> = joined.members.iter().copied().collect();
        key.sort_unstable();
        if !self.seen.insert(key) {
            return None;
        }
        let patterns = |keyword: &'static str| {
            let values = joined.all.iter().filter_map(move |place| place.schema.get(keyword)?.as_str());
            values.map(move |value| (keyword, value))
        };
        // A reference of another kind stands for a pattern that is not seen.
        let unseen =
            patterns("$ref").filter(|(_, name)| self.root.pointer(name.trim_start_matches('#')).is_none());
        let count = patterns("pattern").chain(patterns("format")).chain(unseen).collect::<HashSet<_>>().len();
        if count > MOST {
            return Some((first, format!("{count} patterns have to hold at once; use at most {MOST}")));
        }
        self.definitions(&joined.all);
        self.properties(&joined.all);
        self.items(&joined.all);
        None
    }

    /// Those that nothing refers to by a pointer may still be referred to by another name.
    fn definitions(&mut self, all: &[Place<'a>]) {
        for place in all {
            for keyword in ["$defs", "definitions"] {
                for (name, part) in object(place.schema, keyword) {
                    let part = self.place(Some(place.at), (keyword, Step::Name(name)), part);
                    self.join([part]);
                }
            }
        }
    }

    fn properties(&mut self, all: &[Place<'a>]) {
        let mut named: BTreeMap<(&'static str, &'a str), Vec<Place<'a>>> = BTreeMap::new();
        let mut others: Vec<(usize, Place<'a>)> = Vec::new();
        for (member, place) in all.iter().enumerate() {
            for keyword in ["properties", "patternProperties"] {
                for (name, part) in object(place.schema, keyword) {
                    let part = self.place(Some(place.at), (keyword, Step::Name(name)), part);
                    named.entry((keyword, name)).or_default().push(part);
                    if keyword == "patternProperties" && all.len() > 1 {
                        others.push((member, part));
                    }
                }
            }
            if let Some(part) = place.schema.get("additionalProperties") {
                let part = self.place(Some(place.at), ("additionalProperties", Step::None), part);
                others.push((member, part));
            }
        }
        self.work += named.len() * others.len();
        if self.work > MOST_WORK {
            // Told when the next is looked at.
            self.join(all.first().copied());
            return;
        }
        // A property can be one of those of a pattern, and of the others of an object that does not name it.
        for ((keyword, name), parts) in named {
            let names = |member: usize| object(all[member].schema, keyword).any(|(other, _)| other == name);
            let mut joined = parts;
            if all.len() > 1 {
                joined.extend(others.iter().filter(|(member, _)| !names(*member)).map(|(_, part)| *part));
            }
            self.join(joined);
        }
        self.join(others.into_iter().map(|(_, part)| part));
    }

    fn items(&mut self, all: &[Place<'a>]) {
        let Some(first) = all.first() else { return };
        let places = |keyword: &'static str| {
            move |place: &Place<'a>| {
                let Value::Object(schema) = place.schema else { return 0 };
                list(schema, keyword).count()
            }
        };
        let longest = |keyword| all.iter().map(places(keyword)).max().unwrap_or(0);
        let longest = longest("prefixItems").max(longest("items"));
        self.work += longest * all.len();
        if self.work > MOST_WORK {
            self.join([*first]);
            return;
        }
        for number in 0..=longest {
            let mut joined = Vec::new();
            for place in all {
                let Value::Object(schema) = place.schema else { continue };
                let at = ["prefixItems", "items"].into_iter().find_map(|keyword| {
                    let part = schema.get(keyword)?.as_array()?.get(number)?;
                    Some(((keyword, Step::Number(number)), part))
                });
                let rest = ["items", "additionalItems"].into_iter().find_map(|keyword| {
                    Some(((keyword, Step::None), schema.get(keyword).filter(|part| part.is_object())?))
                });
                if let Some((step, part)) = at.or(rest) {
                    joined.push(self.place(Some(place.at), step, part));
                }
            }
            self.join(joined);
        }
    }
}

fn list<'a>(
    schema: &'a Map<String, Value>,
    keyword: &str,
) -> impl Iterator<Item = (usize, &'a Value)> + use<'a> {
    schema.get(keyword).and_then(Value::as_array).into_iter().flatten().enumerate()
}

fn object<'a>(schema: &'a Value, keyword: &str) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
    let members = schema.get(keyword).and_then(Value::as_object).into_iter().flatten();
    members.map(|(name, part)| (name.as_str(), part))
}
