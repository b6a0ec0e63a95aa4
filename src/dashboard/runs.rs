//! What is told of a run at a glance.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::Runs;
use super::error::Refusal;
use super::folder::Folder;
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
    /// Seconds since 1970.
    started_at: Option<u64>,
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
}

impl Runs {
    /// Returns the runs that there are, and whether there are more than are looked at.
    pub(super) fn all(&self) -> io::Result<(Vec<Run>, bool)> {
        let root = match self {
            Self::One(path) => return Ok((one(path)?.into_iter().collect(), false)),
            Self::Below(path) => path,
        };
        if let Some(run) = one(root)? {
            return Ok((vec![run], false));
        }
        let root = Folder::open(root)?;
        let (names, is_cut_off) = root.names()?;
        let runs = names.into_iter().filter_map(|name| {
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

    /// Returns what there is to tell of it. What older runs lack, or what is damaged, is none.
    pub(super) fn glance(&self) -> Glance {
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
        let told: Option<RunState> = self
            .small(STATE)
            .and_then(|text| serde_json::from_slice(&text).ok());
        let is_taken = (self.folder.again().ok()).and_then(|folder| FolderLock::is_taken(&folder));
        let (state, reason) = phase(is_taken, told.as_ref(), summary.is_some());
        let environments = settings.get("environments").and_then(|all| all.as_table());
        let environments = environments
            .filter(|all| !all.is_empty())
            .map(|all| all.keys().cloned().collect::<Vec<_>>().join(", "));
        Glance {
            name: self.name.clone(),
            state,
            reason,
            started_at: told.map(|told| told.started_at),
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
        }
    }
}
