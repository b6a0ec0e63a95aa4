//! The folders that are written: whether they can be, and how much room they have.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;

use super::Scope;
use super::finding::Finding;
use crate::hub::Hub;
use crate::run::trainable;
use crate::sandbox::CacheFolder;
use crate::trainer::trained_numbers;

/// A prepared runtime has about 30 MB, and some are kept.
const CACHE: u64 = 256 << 20;
/// What sandboxes and agents keep for a moment.
const TEMPORARY: u64 = 64 << 20;
/// Metrics and episodes of a run, besides its checkpoints.
const EPISODES: u64 = 256 << 20;
/// What is written to see whether a folder can be written.
const PROBE: usize = 64 << 10;
/// Bytes of a trained number in a checkpoint: itself, and two moments, each in f32.
const TRAINED: u64 = 12;

/// A folder that is written.
struct Place {
    what: &'static str,
    path: PathBuf,
    wanted: u64,
    /// What names another.
    remedy: String,
}

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let mut places = vec![Place {
        what: "run folder",
        path: scope.out.clone(),
        wanted: EPISODES + checkpoints(scope),
        remedy: "wardian train --out DIR".to_owned(),
    }];
    let mut findings = Vec::new();
    match CacheFolder::User.path() {
        Some(path) => places.push(Place {
            what: "cache",
            path,
            wanted: CACHE,
            remedy: "export WARDIAN_CACHE=DIR".to_owned(),
        }),
        None => findings.push(Finding::missing(
            "disk",
            false,
            "there is no cache: the sandbox is prepared anew by every command",
            "export WARDIAN_CACHE=DIR",
        )),
    }
    places.push(Place {
        what: "temporary files",
        path: std::env::temp_dir(),
        wanted: TEMPORARY,
        remedy: "export TMPDIR=DIR".to_owned(),
    });
    let hub = Hub::from_env();
    if !scope.has_run || super::hub::is_needed(&scope.config) {
        let folder = hub.cache_folder().to_owned();
        places.push(Place {
            what: "hub's cache",
            path: folder,
            // How large a download is, nobody knows before.
            wanted: if hub.is_offline() { 0 } else { CACHE },
            remedy: "export HF_HOME=DIR".to_owned(),
        });
    }
    findings.extend(places.iter().map(Place::judge));
    findings
}

/// Returns what the checkpoints of the run take, with the one that is written while the others are there.
fn checkpoints(scope: &Scope) -> u64 {
    let Some(model) = &scope.model else { return 0 };
    let trained = trained_numbers(model, &trainable(&scope.config));
    let kept = u64::try_from(scope.config.trainer.keep_checkpoints).unwrap_or(u64::MAX);
    let each = trained.saturating_mul(TRAINED);
    // `final/` besides.
    each.saturating_mul(kept.saturating_add(1))
        .saturating_add(trained.saturating_mul(4))
}

impl Place {
    fn judge(&self) -> Finding {
        let path = self.path.display();
        let there = nearest(&self.path);
        let size = there.and_then(|there| rustix::fs::statvfs(there).ok());
        let (free, files) = match &size {
            Some(size) => (size.f_bavail.saturating_mul(size.f_frsize), size.f_favail),
            None => (u64::MAX, u64::MAX),
        };
        // Some file systems have no fixed number of files, and say 0 of 0.
        let lacks_files = size.is_some_and(|size| size.f_files > 0) && files < 16;
        if free < self.wanted || lacks_files {
            let about = format!(
                "{} `{path}`: {} are free and {} wanted{}",
                self.what,
                ByteSize(free),
                ByteSize(self.wanted),
                if lacks_files {
                    ", and no more files can be made"
                } else {
                    ""
                }
            );
            let fix = format!("make room there, or `{}` on a larger disk", self.remedy);
            return Finding::wrong("disk", about, fix);
        }
        match there.map(probe) {
            Some(Ok(())) => Finding::fine(
                "disk",
                format!(
                    "{} `{path}` can be written, {} are free",
                    self.what,
                    ByteSize(free)
                ),
            ),
            Some(Err(error)) => {
                let about = format!("{} `{path}` cannot be written: {error}", self.what);
                let fix = format!(
                    "`{}` with a folder that can be, or change whose it is",
                    self.remedy
                );
                Finding::wrong("disk", about, fix)
            }
            None => {
                let about = format!("{} `{path}` has no folder above it", self.what);
                Finding::wrong("disk", about, format!("`{}`", self.remedy))
            }
        }
    }
}

/// Returns the path, or what is nearest above it that is there.
fn nearest(path: &Path) -> Option<&Path> {
    let found = path.ancestors().find(|path| path.exists());
    // A path of one name has nothing above it but where we are.
    found.or_else(|| path.is_relative().then_some(Path::new(".")))
}

/// Writes a file, which is gone afterwards.
fn probe(folder: &Path) -> std::io::Result<()> {
    let mut file = tempfile::tempfile_in(folder)?;
    file.write_all(&[0; PROBE])?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    fn place(path: PathBuf, wanted: u64) -> Place {
        Place {
            what: "cache",
            path,
            wanted,
            remedy: "export X=DIR".to_owned(),
        }
    }

    #[test]
    fn a_folder_to_be_made_is_judged_by_the_one_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let found = place(folder.path().join("a/b"), 1).judge();
        assert_eq!(found.state, State::Fine, "{found:?}");
        assert!(!folder.path().join("a").exists(), "nothing is left there");
        assert_eq!(nearest(Path::new("no-such-name")), Some(Path::new(".")));
    }

    #[test]
    fn too_little_room_names_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let found = place(folder.path().to_owned(), u64::MAX).judge();
        assert_eq!(found.state, State::Wrong);
        assert!(found.about.contains("are free and"), "{found:?}");
        assert!(found.fix.unwrap().contains("export X=DIR"));
    }

    #[test]
    fn a_file_in_the_place_of_a_folder_cannot_be_written_into() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs_err::write(&file, "").unwrap();
        let found = place(file.join("cache"), 1).judge();
        assert_eq!(found.state, State::Wrong, "{found:?}");
        assert!(found.about.contains("cannot be written"), "{found:?}");
    }
}
