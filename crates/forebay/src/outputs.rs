//! The files that a run writes: never over something that it reads, and never two over one another.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use forebay_io::file::check_irregular;

use crate::failure::Failure;

/// Links in a row that are followed; systems follow no more.
const MAX_LINKS: usize = 40;

/// A file, whatever its names: two spots are equal exactly if writing to one changes the other.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Spot {
    /// A file that is there, by the numbers of its disk and on its disk.
    #[cfg(unix)]
    There(u64, u64),
    /// A file that is not there yet, or where files have no numbers: without links in its path.
    Named(PathBuf),
}

impl Spot {
    fn of(path: &Path) -> Self {
        #[cfg(unix)]
        if let Ok(found) = std::fs::metadata(path) {
            use std::os::unix::fs::MetadataExt;
            return Self::There(found.dev(), found.ino());
        }
        Self::Named(resolved(path))
    }
}

/// The path without links, even if nothing is there yet: what is created through a link to nothing is created where
/// the link points to.
fn resolved(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = folder_of(&path).join(target);
    }
    if let Ok(whole) = std::fs::canonicalize(&path) {
        return whole;
    }
    match (std::fs::canonicalize(folder_of(&path)), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path,
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// What must not be written to.
#[derive(Default)]
pub struct Protected {
    files: Vec<(Spot, String)>,
    /// Without links.
    folders: Vec<(PathBuf, &'static str)>,
}

/// A file that may be written.
pub struct Claim {
    path: PathBuf,
    what: &'static str,
}

impl Protected {
    /// What a run on the model in the first of `roots`, with copies in the others, reads: all their files, and the
    /// texts at `inputs`. Standard input and output count too where they are files.
    pub fn of_run(roots: &[PathBuf], inputs: &[Option<&Path>]) -> Self {
        let mut protected = Self::default();
        for (at, root) in roots.iter().enumerate() {
            protected
                .folder(root, if at == 0 { "the model's folder" } else { "a folder of copies of the model" });
        }
        inputs.iter().flatten().for_each(|path| protected.file(path, "it is read by this command"));
        #[cfg(unix)]
        for name in ["stdin", "stdout", "stderr"] {
            let path = Path::new("/dev").join(name);
            if std::fs::metadata(&path).is_ok_and(|found| found.is_file()) {
                protected.file(&path, &format!("it is this command's {name}"));
            }
        }
        protected
    }

    /// Protects a file; `why` is a sentence without its end.
    pub fn file(&mut self, path: &Path, why: &str) {
        self.files.push((Spot::of(path), why.to_owned()));
    }

    /// Protects a folder: nothing is created in it, and its files are not written through other names.
    fn folder(&mut self, dir: &Path, what: &'static str) {
        if let Ok(real) = std::fs::canonicalize(dir) {
            self.folders.push((real, what));
        }
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            // Files of a hub's cache are links.
            if entry.path().is_file() {
                let name = entry.file_name();
                self.file(&entry.path(), &format!("it is {} in {what}", name.to_string_lossy()));
            }
        }
    }

    /// Refuses a path that leads to anything protected, or to what cannot be written like a file.
    pub fn check(&self, path: &Path, what: &str) -> Result<(), Failure> {
        let refused = |why: &str| {
            Failure::usage(format!("cannot write {what} {}: {why}; choose another path", path.display()))
        };
        // A stream that is open already, or a device that takes what it gets, is no file to protect.
        if is_stream(path) {
            return Ok(());
        }
        check_irregular(path).map_err(|error| refused(&error.to_string()))?;
        let spot = Spot::of(path);
        if let Some((_, why)) = self.files.iter().find(|(taken, _)| *taken == spot) {
            return Err(refused(why));
        }
        let target = resolved(path);
        match self.folders.iter().find(|(folder, _)| folder_of(&target) == folder) {
            Some((_, folder)) => Err(refused(&format!("that is in {folder}"))),
            None => Ok(()),
        }
    }

    /// The same, and nobody else gets this file.
    pub fn claim(&mut self, path: &Path, what: &'static str) -> Result<Claim, Failure> {
        self.check(path, what)?;
        if !is_stream(path) {
            self.file(path, &format!("{what} goes there"));
        }
        Ok(Claim { path: path.to_owned(), what })
    }
}

impl Claim {
    /// Makes the file, empty.
    pub fn create(&self) -> Result<File, Failure> {
        File::create(&self.path).map_err(|error| self.failed(&error, "choose another path"))
    }

    /// Makes the file, which must not be there.
    pub fn create_new(&self) -> Result<File, Failure> {
        File::create_new(&self.path).map_err(|error| self.failed(&error, "choose a name that is free"))
    }

    fn failed(&self, error: &io::Error, advice: &str) -> Failure {
        Failure::usage(format!("cannot write {} {}: {error}; {advice}", self.what, self.path.display()))
    }
}

/// Whether a path names a stream that this program has open, or one of the system's devices that take any bytes.
/// These are no regular files, and opening them waits for nobody.
pub fn is_stream(path: &Path) -> bool {
    let open = ["/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/null", "/dev/full", "/dev/tty"];
    let by_number = ["/dev/fd", "/proc/self/fd"].iter().any(|dir| path.parent() == Some(Path::new(dir)));
    let known = by_number || open.iter().any(|name| path == Path::new(name));
    known && !path.is_file()
}

/// Refuses to make the folder `out` in the model's folder `source`.
pub fn check_apart(source: &Path, out: &Path) -> Result<(), Failure> {
    let Ok(source) = std::fs::canonicalize(source) else { return Ok(()) };
    // The folders above it may not be there yet.
    let above =
        out.ancestors().map(|above| if above.as_os_str().is_empty() { Path::new(".") } else { above });
    let real = above.map(resolved).find(|above| above.exists());
    match real.is_some_and(|real| real.starts_with(&source)) {
        false => Ok(()),
        true => Err(Failure::usage(format!(
            "cannot write to {}: that is in {}, which is read; choose a folder outside of it",
            out.display(),
            source.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_file_is_itself_by_any_name() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("a"), "x").unwrap();
        std::fs::hard_link(at("a"), at("hard")).unwrap();
        symlink("a", at("soft")).unwrap();
        symlink("new", at("dangling")).unwrap();
        std::fs::create_dir(at("sub")).unwrap();
        symlink("..", at("sub/up")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for name in ["hard", "soft", "sub/up/a", "sub/../a"] {
            assert_eq!(Spot::of(&at(name)), Spot::of(&at("a")), "{name}");
        }
        for name in ["dangling", "sub/up/new", "./new", "sub/up/dangling"] {
            assert_eq!(Spot::of(&at(name)), Spot::of(&at("new")), "{name}");
        }
        assert_ne!(Spot::of(&at("a")), Spot::of(&at("new")));
        assert_ne!(Spot::of(&at("loop")), Spot::of(&at("new")));
        assert!(is_stream(Path::new("/dev/null")) && !is_stream(&at("a")));
    }

    #[test]
    fn a_result_is_not_made_in_its_source() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir(&source).unwrap();
        for inside in ["source", "source/new", "source/new/er", "source/../source/new"] {
            assert!(check_apart(&source, &dir.path().join(inside)).is_err(), "{inside}");
        }
        for outside in ["", "new", "source2", "source/../new/er"] {
            assert!(check_apart(&source, &dir.path().join(outside)).is_ok(), "{outside}");
        }
    }
}
