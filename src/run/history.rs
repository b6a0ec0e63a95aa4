//! Run folders as they are found: what each came to, and what two of them differ in.
//!
//! All is read from the files of the folders, by [`RunRecord::read`]; nothing is written, and runs that still go are
//! not held up.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fs_err as fs;
use serde::Serialize;
use serde_json::{Map, Value};

use super::state::{Phase, RunState, STATE, phase};
use super::{FolderLock, Measured, RunError, Summary};
use crate::config::hide_secrets;

/// Most of a file that is read: metrics of a hundred thousand steps have a third of it.
const MAX_METRICS: u64 = 512 << 20;
/// Most of a run's configuration and of its summary.
const MAX_SMALL: u64 = 4 << 20;

/// The end and the best of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Curve {
    /// Its last value.
    pub last: f64,
    /// Its highest.
    pub highest: f64,
    /// The step of its highest.
    pub highest_step: u64,
    /// Its lowest.
    pub lowest: f64,
    /// The mean of its values.
    pub mean: f64,
    /// How many it has.
    pub count: u64,
}

/// A share of samples that pass, with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PassRate {
    /// The policy's step.
    pub step: u64,
    /// The share.
    pub pass_at_1: f64,
    /// Its interval.
    pub ci95: [f64; 2],
}

/// A run as its folder tells of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunRecord {
    /// The folder's name.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    /// How it stands.
    pub state: Phase,
    /// Optimizer steps done.
    pub steps: u64,
    /// Optimizer steps that it is to have; none where its configuration does not say.
    pub planned_steps: Option<u64>,
    /// When its folder was made, in seconds since 1970; none where the file system does not tell.
    pub started: Option<u64>,
    /// Wall-clock seconds: of the whole run where it is finished, else of its steps.
    pub seconds: f64,
    /// The first measurement.
    pub before: Option<PassRate>,
    /// The last measurement.
    pub after: Option<PassRate>,
    /// The best measurement.
    pub best: Option<PassRate>,
    /// Every metric of its steps, by name.
    pub curves: BTreeMap<String, Curve>,
    /// Its settings by key, as they are written in its configuration.
    #[serde(skip)]
    pub settings: BTreeMap<String, String>,
}

impl RunRecord {
    /// Reads the folder of a run.
    ///
    /// # Errors
    ///
    /// Fails where the folder holds no run, or a file of it cannot be read.
    pub fn read(folder: &Path) -> Result<Self, RunError> {
        let Some(text) = read_bounded(&folder.join("run.toml"))? else {
            return Err(RunError::NoRun {
                path: folder.to_owned(),
            });
        };
        // A run of another version is worth having, whatever its keys.
        let settings = text
            .parse::<toml::Table>()
            .map(|mut table| {
                hide_secrets(&mut table);
                flat(&table)
            })
            .unwrap_or_default();
        let summary = read_bounded(&folder.join("summary.json"))?;
        let summary: Option<Summary> = summary.and_then(|text| serde_json::from_str(&text).ok());
        let told = read_bounded(&folder.join(STATE))?;
        let told: Option<RunState> = told.and_then(|text| serde_json::from_str(&text).ok());
        let taken = fs::File::open(folder).ok();
        let is_taken = taken.and_then(|folder| FolderLock::is_taken(folder.file()));
        let mut metrics = Metrics::default();
        metrics.read(&folder.join("metrics.jsonl"))?;
        let made = fs::metadata(folder)?;
        let started = made
            .created()
            .or_else(|_| fs::metadata(folder.join("run.toml"))?.modified());
        let started = started
            .ok()
            .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let (first, last) = (
            metrics.measured.first().copied(),
            metrics.measured.last().copied(),
        );
        let of_summary = |step: u64, measured: &Measured| PassRate {
            step,
            pass_at_1: measured.pass_at_1,
            ci95: measured.ci95,
        };
        let steps = summary
            .as_ref()
            .map_or(metrics.steps, |summary| summary.steps as u64);
        let before = summary
            .as_ref()
            .map(|all| of_summary(0, &all.change.before))
            .or(first);
        let after = summary
            .as_ref()
            .map(|all| of_summary(steps, &all.change.after))
            .or(last);
        let best = (metrics.measured.iter().copied())
            .chain(before)
            .chain(after)
            .max_by(|a, b| a.pass_at_1.total_cmp(&b.pass_at_1));
        let of_steps = metrics.curves.get("step_time");
        let of_steps = of_steps.map_or(0.0, |curve| curve.mean * curve.count as f64);
        let name = fs::canonicalize(folder)?;
        Ok(Self {
            name: name
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            state: phase(is_taken, told.as_ref(), summary.is_some()).0,
            folder: folder.to_owned(),
            steps,
            planned_steps: settings
                .get("trainer.steps")
                .and_then(|steps| steps.parse().ok()),
            started: started.map(|time| time.as_secs()),
            seconds: summary.as_ref().map_or(of_steps, |summary| summary.wall_s),
            before,
            after,
            best,
            curves: metrics.curves,
            settings,
        })
    }

    /// Reads all runs of a folder, the newest first. What holds no run is left out, and with a warning one that
    /// cannot be read.
    ///
    /// # Errors
    ///
    /// Fails where the folder cannot be read.
    pub fn read_all(folder: &Path) -> Result<Vec<Self>, RunError> {
        let mut runs = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            // A run file alone is one to start from.
            let has = |name: &str| path.join(name).is_file();
            let is_run =
                has("run.toml") && (has(STATE) || has("metrics.jsonl") || has("summary.json"));
            if !is_run {
                continue;
            }
            match Self::read(&path) {
                Ok(run) => runs.push(run),
                Err(error) => {
                    tracing::warn!(%error, path = %path.display(), "a run cannot be read");
                }
            }
        }
        runs.sort_by(|a, b| (b.started, &b.name).cmp(&(a.started, &a.name)));
        Ok(runs)
    }

    /// Returns the settings that differ from those of another run: key, this run's, the other's.
    #[must_use]
    pub fn changed_settings(&self, other: &Self) -> Vec<(String, Option<String>, Option<String>)> {
        let keys: BTreeSet<&String> = self.settings.keys().chain(other.settings.keys()).collect();
        let values = |key: &String| {
            (
                key.clone(),
                self.settings.get(key).cloned(),
                other.settings.get(key).cloned(),
            )
        };
        let all = keys.into_iter().map(values);
        all.filter(|(_, left, right)| left != right).collect()
    }
}

/// Reads a small file; none if it is not there.
fn read_bounded(path: &Path) -> Result<Option<String>, RunError> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut text = String::new();
    file.take(MAX_SMALL).read_to_string(&mut text)?;
    Ok(Some(text))
}

/// Returns the values of a table by their keys' paths, as TOML.
fn flat(table: &toml::Table) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut open = vec![(String::new(), table)];
    while let Some((prefix, table)) = open.pop() {
        for (key, value) in table {
            let key = format!("{prefix}{key}");
            match value.as_table() {
                Some(inner) => open.push((format!("{key}."), inner)),
                None => {
                    found.insert(key, value.to_string());
                }
            }
        }
    }
    found
}

/// What `metrics.jsonl` comes to.
#[derive(Debug, Default)]
struct Metrics {
    steps: u64,
    curves: BTreeMap<String, Curve>,
    measured: Vec<PassRate>,
}

impl Metrics {
    /// Reads a file line by line; a line that a crash cut off is left out.
    fn read(&mut self, path: &Path) -> Result<(), RunError> {
        let file = match fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for line in BufReader::new(file.take(MAX_METRICS)).lines() {
            if let Ok(row) = serde_json::from_str::<Map<String, Value>>(&line?) {
                self.add(&row);
            }
        }
        Ok(())
    }

    fn add(&mut self, row: &Map<String, Value>) {
        let Some(step) = row.get("step").and_then(Value::as_u64) else {
            return;
        };
        if let Some(pass_at_1) = row.get("eval/pass_at_1").and_then(Value::as_f64) {
            let bounds = row.get("eval/ci95").and_then(Value::as_array);
            let bound = |at: usize| {
                bounds
                    .and_then(|all| all.get(at)?.as_f64())
                    .unwrap_or(f64::NAN)
            };
            self.measured.push(PassRate {
                step,
                pass_at_1,
                ci95: [bound(0), bound(1)],
            });
            return;
        }
        self.steps = self.steps.max(step);
        for (name, value) in row {
            let Some(value) = value.as_f64().filter(|_| name != "step") else {
                continue;
            };
            let curve = self.curves.entry(name.clone()).or_insert(Curve {
                last: value,
                highest: value,
                highest_step: step,
                lowest: value,
                mean: 0.0,
                count: 0,
            });
            if value > curve.highest {
                (curve.highest, curve.highest_step) = (value, step);
            }
            curve.lowest = curve.lowest.min(value);
            curve.last = value;
            curve.count += 1;
            curve.mean += (value - curve.mean) / curve.count as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    const METRICS: &str = "\
{\"step\": 0, \"eval/pass_at_1\": 0.25, \"eval/ci95\": [0.2, 0.3]}
{\"step\": 1, \"reward\": 0.5, \"step_time\": 2.0}
{\"step\": 2, \"reward\": 0.75, \"step_time\": 4.0, \"anomalies\": [\"flat\"]}
{\"step\": 2, \"eval/pass_at_1\": 0.5, \"eval/ci95\": [0.4, 0.6]}
{\"step\": 3, \"reward\": 0.625, \"step_time\": 3.0}
{\"step\": 4, \"rew";

    #[test]
    fn a_run_that_was_stopped_is_read_from_its_metrics() {
        let run = "seed = 1\n[trainer]\nsteps = 9\n[log]\nhttp = 'http://me:secret@example.org'\n";
        let folder = folder_with(&[("run.toml", run), ("metrics.jsonl", METRICS)]);
        let record = RunRecord::read(folder.path()).unwrap();
        assert_eq!(record.state, Phase::Stopped);
        assert_eq!((record.steps, record.planned_steps), (3, Some(9)));
        assert_eq!(record.seconds, 9.0);
        let reward = record.curves["reward"];
        assert_eq!(
            (reward.last, reward.highest, reward.highest_step),
            (0.625, 0.75, 2)
        );
        assert_eq!((reward.lowest, reward.mean, reward.count), (0.5, 0.625, 3));
        let rates = [record.before, record.after, record.best].map(|rate| rate.unwrap().pass_at_1);
        assert_eq!(rates, [0.25, 0.5, 0.5]);
        assert!(!format!("{:?}", record.settings).contains("secret"));
    }

    #[test]
    fn a_run_that_goes_on_is_seen_by_its_lock() {
        let folder = folder_with(&[("run.toml", "")]);
        let state = || RunRecord::read(folder.path()).unwrap().state;
        assert_eq!(state(), Phase::Stopped);
        let lock = FolderLock::take(folder.path()).unwrap();
        assert_eq!(state(), Phase::Running);
        drop(lock);
        assert_eq!(state(), Phase::Stopped);
        FolderLock::take(folder.path()).unwrap();
    }

    #[test]
    fn settings_that_differ_are_found_by_their_keys() {
        let left = folder_with(&[(
            "run.toml",
            "seed = 1\n[trainer]\nsteps = 9\nmode = 'lora'\n",
        )]);
        let right = folder_with(&[(
            "run.toml",
            "seed = 1\n[trainer]\nsteps = 10\n[eval]\nk = [1]\n",
        )]);
        let [left, right] = [left, right].map(|folder| RunRecord::read(folder.path()).unwrap());
        let changed = left.changed_settings(&right);
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            changed,
            [
                ("eval.k".to_owned(), None, some("[1]")),
                ("trainer.mode".to_owned(), some("\"lora\""), None),
                ("trainer.steps".to_owned(), some("9"), some("10")),
            ]
        );
    }

    #[test]
    fn what_is_no_run_is_refused_alone_and_left_out_among_others() {
        let folder = folder_with(&[("note.txt", "")]);
        let error = RunRecord::read(folder.path()).unwrap_err();
        assert!(matches!(error, RunError::NoRun { .. }), "{error}");
        assert_eq!(RunRecord::read_all(folder.path()).unwrap(), []);
    }
}
