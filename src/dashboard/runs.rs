//! What is told of a run at a glance.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use serde_json::Value;

use super::Runs;
use super::error::Refusal;
use super::folder::{Folder, MAX_NAMES, Version};
use super::metrics::last_rows;
use crate::address::shown;
use crate::config::{RunConfig, hide_secrets};
use crate::run::{FolderLock, Phase, RunState, STATE, phase};

/// The largest `run.toml`, `summary.json` or `state.json` that is read.
const MAX_FILE: u64 = 1 << 20;

/// A run folder with its name.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) folder: Folder,
}

/// What the list has of a run.
#[derive(Debug, Serialize)]
pub(super) struct Glance {
    name: String,
    state: Phase,
    /// Why it stopped or failed.
    reason: Option<String>,
    #[serde(flatten, serialize_with = "shared")]
    read: Arc<Read>,
}

fn shared<S: serde::Serializer>(read: &Read, serializer: S) -> Result<S::Ok, S::Error> {
    read.serialize(serializer)
}

/// What its files say of a run.
#[derive(Debug, Serialize)]
pub(super) struct Read {
    /// When its first process began, in seconds since 1970, and the last one, where that is another.
    started_at: Option<u64>,
    resumed_at: Option<u64>,
    updated_at: Option<u64>,
    model: Option<String>,
    tasks: Option<String>,
    /// Steps done, and those asked for.
    steps: u64,
    planned: Option<u64>,
    /// Of the last step.
    reward: Option<f64>,
    pass_rate: Option<f64>,
    /// The last measurement on held-out tasks.
    eval: Option<f64>,
    /// `summary.json`, once there is one.
    summary: Option<Value>,
    #[serde(skip)]
    told: Option<RunState>,
}

/// What was read of runs, for as long as their files stay the same: a page asks every few seconds.
#[derive(Debug, Default)]
pub(super) struct Glances {
    known: Mutex<HashMap<String, (Stamp, Arc<Read>)>>,
}

/// The files that a glance is of.
type Stamp = [Option<Version>; FILES.len()];

const FILES: [&str; 4] = ["run.toml", "metrics.jsonl", "summary.json", STATE];

/// The largest files whose content is remembered; that of others is read each time.
const MAX_KNOWN: u64 = 64 << 10;

impl Glance {
    /// Returns where the run is, and how many steps are done.
    pub(super) fn progress(&self) -> (Phase, u64) {
        (self.state, self.read.steps)
    }
}

impl Runs {
    /// Returns the runs that there are, those that changed last if they are too many, and whether they are.
    pub(super) fn all(&self) -> io::Result<(Vec<Run>, bool)> {
        let root = match self {
            Self::One(path) => return Ok((one(path)?.into_iter().collect(), false)),
            Self::Below(path) => path,
        };
        if let Some(run) = one(root)? {
            return Ok((vec![run], false));
        }
        let root = Folder::open(root)?;
        let (names, is_cut_off) = root.largest(MAX_NAMES, |name| root.changed_at(name))?;
        let runs = names.into_iter().filter_map(|(_, name)| {
            let folder = root.folder(&name).ok()?;
            holds_run(&folder).then_some(Run { name, folder })
        });
        Ok((runs.collect(), is_cut_off))
    }

    /// Returns the run of a name.
    pub(super) fn get(&self, name: &str) -> Result<Run, Refusal> {
        let absent = || Refusal::NotFound {
            what: format!("run `{}`", name.chars().take(200).collect::<String>()),
        };
        let (Self::One(path) | Self::Below(path)) = self;
        let own = one(path).map_err(|_| absent())?;
        if let Some(run) = own {
            return if run.name == name {
                Ok(run)
            } else {
                Err(absent())
            };
        }
        if let Self::One(_) = self {
            return Err(absent());
        }
        let folder = Folder::open(path).and_then(|root| root.folder(name));
        let folder = folder.ok().filter(holds_run).ok_or_else(absent)?;
        Ok(Run {
            name: name.to_owned(),
            folder,
        })
    }
}

/// Returns the run that `path` is, if it is one.
fn one(path: &Path) -> io::Result<Option<Run>> {
    let folder = match Folder::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        folder => folder?,
    };
    if !holds_run(&folder) {
        return Ok(None);
    }
    let name = fs_err::canonicalize(path)?;
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    Ok(Some(Run {
        name: name.into_owned(),
        folder,
    }))
}

fn holds_run(folder: &Folder) -> bool {
    folder.file("run.toml").is_ok()
}

impl Run {
    /// Returns a small file, if it is there and can be read.
    fn small(&self, name: &str) -> Option<Vec<u8>> {
        self.folder.read(name, MAX_FILE).ok()
    }

    /// Returns `run.toml` as people may see it; none where it is no TOML, and nobody knows what is in it.
    pub(super) fn run_toml(&self) -> Option<String> {
        let mut table: toml::Table = String::from_utf8(self.small("run.toml")?)
            .ok()?
            .parse()
            .ok()?;
        hide_secrets(&mut table);
        Some(table.to_string())
    }

    /// Returns the settings, if this version knows all of them.
    pub(super) fn config(&self) -> Option<RunConfig> {
        toml::from_str(&String::from_utf8(self.small("run.toml")?).ok()?).ok()
    }

    /// Returns the first step whose episodes were compared by the settings that `run.toml` has now.
    pub(super) fn settings_since(&self) -> u64 {
        let told = self.told();
        told.and_then(|told| told.settings_since).unwrap_or(0)
    }

    fn told(&self) -> Option<RunState> {
        serde_json::from_slice(&self.small(STATE)?).ok()
    }

    /// Returns what there is to tell of it.
    pub(super) fn glance(&self, glances: &Glances) -> Glance {
        let read = glances.of(self);
        let is_taken = (self.folder.again().ok()).and_then(|folder| FolderLock::is_taken(&folder));
        let (state, reason) = phase(is_taken, read.told.as_ref(), read.summary.is_some());
        Glance {
            name: self.name.clone(),
            state,
            reason,
            read,
        }
    }

    /// Reads what its files say. What older runs lack, or what is damaged, is none.
    fn read(&self) -> Read {
        let text = self.small("run.toml").unwrap_or_default();
        let settings: toml::Table =
            toml::from_str(&String::from_utf8_lossy(&text)).unwrap_or_default();
        let of = |table: &str, key: &str| settings.get(table)?.get(key).cloned();
        let text = |table, key| of(table, key)?.as_str().map(shown);
        let mut metrics = self.folder.file("metrics.jsonl").ok();
        let updated_at =
            (metrics.as_ref()).and_then(|file| u64::try_from(file.metadata().ok()?.mtime()).ok());
        let rows = metrics
            .as_mut()
            .and_then(|file| last_rows(file).ok())
            .unwrap_or_default();
        let last = |name: &str| rows.iter().rev().find_map(|row| row.get(name)?.as_f64());
        let steps = rows
            .iter()
            .filter_map(|row| row.get("step")?.as_u64())
            .max();
        let summary = self
            .small("summary.json")
            .and_then(|text| serde_json::from_slice(&text).ok());
        let told = self.told();
        let last_start = told.as_ref().map(|told| told.started_at);
        let first_start = told.as_ref().and_then(|told| told.began_at).or(last_start);
        let environments = settings.get("environments").and_then(|all| all.as_table());
        let environments = environments
            .filter(|all| !all.is_empty())
            .map(|all| all.keys().cloned().collect::<Vec<_>>().join(", "));
        Read {
            started_at: first_start,
            resumed_at: last_start.filter(|last| Some(*last) != first_start),
            updated_at,
            model: text("model", "path"),
            tasks: environments.or_else(|| text("task", "path")),
            steps: steps.unwrap_or(0),
            planned: of("trainer", "steps")
                .and_then(|steps| u64::try_from(steps.as_integer()?).ok()),
            reward: last("reward"),
            pass_rate: last("pass_rate"),
            eval: last("eval/pass_at_1"),
            summary,
            told,
        }
    }
}

impl Glances {
    fn of(&self, run: &Run) -> Arc<Read> {
        let stamp: Stamp = FILES.map(|name| run.folder.version(name));
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, read)) = lock().get(&run.name)
            && *known == stamp
        {
            return Arc::clone(read);
        }
        let read = Arc::new(run.read());
        let is_small = |name: &usize| stamp[*name].is_none_or(|file| file.length() <= MAX_KNOWN);
        // Rows of metrics are not kept, however many there are.
        if [0, 2, 3].iter().all(is_small) {
            let mut known = lock();
            if known.len() >= MAX_NAMES {
                known.clear();
            }
            known.insert(run.name.clone(), (stamp, Arc::clone(&read)));
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_again_once_a_file_of_it_has_changed() {
        let root = tempfile::tempdir().unwrap();
        fs_err::write(root.path().join("run.toml"), "trainer.steps = 4\n").unwrap();
        let metrics = root.path().join("metrics.jsonl");
        fs_err::write(&metrics, "{\"step\":1}\n").unwrap();
        let run = one(root.path()).unwrap().unwrap();
        let glances = Glances::default();
        let first = glances.of(&run);
        assert_eq!((first.steps, first.planned), (1, Some(4)));
        assert!(Arc::ptr_eq(&first, &glances.of(&run)));
        fs_err::write(&metrics, "{\"step\":1}\n{\"step\":2}\n").unwrap();
        assert_eq!(glances.of(&run).steps, 2);
        // A summary that nobody writes is read, and not kept.
        let large = format!("{{\"x\":\"{}\"}}", "x".repeat(100_000));
        fs_err::write(root.path().join("summary.json"), large).unwrap();
        let read = glances.of(&run);
        assert!(read.summary.is_some() && !Arc::ptr_eq(&read, &glances.of(&run)));
    }

    #[test]
    fn a_run_began_when_its_first_process_did() {
        let root = tempfile::tempdir().unwrap();
        fs_err::write(root.path().join("run.toml"), "").unwrap();
        let of = |state: &str| {
            fs_err::write(root.path().join(STATE), state).unwrap();
            let read = one(root.path()).unwrap().unwrap().read();
            (read.started_at, read.resumed_at)
        };
        let resumed = r#"{"state":"running","began_at":5,"started_at":9}"#;
        assert_eq!(of(resumed), (Some(5), Some(9)));
        let older = r#"{"state":"running","started_at":9}"#;
        assert_eq!(of(older), (Some(9), None));
    }
}
