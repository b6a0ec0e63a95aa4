//! What a run takes of its machine while it goes: `load.jsonl` of the run folder.
//!
//! It is for who looks at runs, and nothing reads it back. A thread of its own looks every few seconds, so
//! no step waits for it, and what cannot be written ends no run. Numbers of time are in no file that a
//! resumed run writes to the same bytes.

mod gpus;
mod host;

use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use self::gpus::{Gpu, Gpus};
use self::host::{Counters, Memory};
use crate::sandbox::Activity;

/// The name of the file.
pub(crate) const LOAD: &str = "load.jsonl";
/// Time between looks.
const EVERY: Duration = Duration::from_secs(5);
/// The longest file; beyond that every second row goes, so that it still tells of the whole run.
const MAX_FILE: u64 = 4 << 20;

/// One look; a row of the file. What the system does not tell is left out.
#[derive(Debug, Serialize)]
struct Row {
    /// Seconds since 1970.
    time: u64,
    /// Share of the machine's CPU time that was used since the last look, by all.
    #[serde(rename = "host/cpu", skip_serializing_if = "Option::is_none")]
    cpu: Option<f64>,
    /// Cores that this process used.
    #[serde(rename = "process/cores", skip_serializing_if = "Option::is_none")]
    cores: Option<f64>,
    #[serde(flatten)]
    memory: Memory,
    #[serde(rename = "gpus", skip_serializing_if = "Vec::is_empty")]
    gpus: Vec<Gpu>,
    /// Programs and gradings that run or wait.
    #[serde(rename = "sandbox/under_way", skip_serializing_if = "Option::is_none")]
    under_way: Option<u64>,
    /// Those that ended, a second.
    #[serde(rename = "sandbox/per_second", skip_serializing_if = "Option::is_none")]
    per_second: Option<f64>,
    #[serde(flatten)]
    actors: Option<ActorLoad>,
}

/// The actors of a run as of now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct ActorLoad {
    /// Episodes that have room for one.
    #[serde(rename = "actor/in_use")]
    pub(super) in_use: usize,
    /// Episodes that wait for room.
    #[serde(rename = "actor/waiting")]
    pub(super) waiting: usize,
}

/// What is asked of a run at each look.
pub(super) trait Busy: Send + 'static {
    /// Returns what its sandbox has to do; none where it has none here.
    fn sandbox(&self) -> Option<Activity>;
    /// Returns what its actors are like; none where it has none.
    fn actors(&self) -> Option<ActorLoad>;
}

/// Writes the file until it is dropped.
#[derive(Debug)]
pub(super) struct LoadLog {
    over: Arc<Over>,
    thread: Option<JoinHandle<()>>,
}

/// Whether nobody wants to know any more.
#[derive(Debug, Default)]
struct Over {
    is_over: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl LoadLog {
    /// Begins to look; none where no thread can be had.
    pub(super) fn start(root: &Path, busy: impl Busy) -> Option<Self> {
        let over = Arc::new(Over::default());
        let (path, end) = (root.join(LOAD), Arc::clone(&over));
        let thread = std::thread::Builder::new()
            .name("load".to_owned())
            .spawn(move || look(&path, &busy, &end));
        match thread {
            Ok(thread) => Some(Self {
                over,
                thread: Some(thread),
            }),
            Err(error) => {
                tracing::warn!(%error, "the load of the machine is not kept");
                None
            }
        }
    }
}

impl Drop for LoadLog {
    fn drop(&mut self) {
        {
            let _lock = self
                .over
                .lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            self.over.is_over.store(true, Ordering::Relaxed);
        }
        self.over.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panicked only if it has said so.
            let _ = thread.join();
        }
    }
}

impl Over {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Waits for the next look; returns whether there is one.
    fn wait(&self) -> bool {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = (self.changed).wait_timeout_while(lock, EVERY, |()| !self.is_over());
        drop(waited);
        !self.is_over()
    }
}

fn look(path: &Path, busy: &impl Busy, over: &Over) {
    let mut gpus = Gpus::find();
    let mut last = Last::now(busy);
    loop {
        let row = last.row(busy, gpus.look(&|| over.is_over()));
        if let Err(error) = append(path, &row) {
            tracing::warn!(%error, "the load of the machine is not kept any more");
            return;
        }
        if !over.wait() {
            return;
        }
    }
}

/// The last look, as far as the next one is compared with it.
struct Last {
    at: Instant,
    counters: Counters,
    ended: Option<u64>,
}

impl Last {
    fn now(busy: &impl Busy) -> Self {
        Self {
            at: Instant::now(),
            counters: Counters::read(),
            ended: busy.sandbox().map(|sandbox| sandbox.ended),
        }
    }

    /// Looks anew.
    fn row(&mut self, busy: &impl Busy, gpus: Vec<Gpu>) -> Row {
        let before = std::mem::replace(self, Self::now(busy));
        let seconds = (self.at - before.at).as_secs_f64();
        let is_long = seconds > 0.1;
        let sandbox = busy.sandbox();
        let ended = self.ended.zip(before.ended);
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Row {
            time: time.map_or(0, |time| time.as_secs()),
            cpu: self.counters.share_since(&before.counters),
            cores: (self.counters.cores_since(&before.counters, seconds)).filter(|_| is_long),
            memory: Memory::read(),
            gpus,
            under_way: sandbox.map(|sandbox| sandbox.under_way),
            per_second: ended
                .filter(|_| is_long)
                .map(|(now, then)| now.saturating_sub(then) as f64 / seconds),
            actors: busy.actors(),
        }
    }
}

/// Adds a row, in one write: a crash leaves whole lines.
fn append(path: &Path, row: &Row) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(row)?;
    line.push(b'\n');
    let mut file = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?;
    file.write_all(&line)?;
    if file.metadata()?.len() > MAX_FILE {
        drop(file);
        thin(path)?;
    }
    Ok(())
}

/// Leaves every second row out.
fn thin(path: &Path) -> std::io::Result<()> {
    let text = fs_err::read_to_string(path)?;
    let kept: String = text.split_inclusive('\n').skip(1).step_by(2).collect();
    super::write_atomically(path, kept.as_bytes()).map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    struct Idle;

    impl Busy for Idle {
        fn sandbox(&self) -> Option<Activity> {
            Some(Activity {
                under_way: 3,
                ended: 8,
            })
        }

        fn actors(&self) -> Option<ActorLoad> {
            None
        }
    }

    fn rows(path: &Path) -> Vec<Value> {
        let text = fs_err::read_to_string(path).unwrap_or_default();
        let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
        rows.collect()
    }

    #[test]
    fn a_run_has_a_row_at_once_and_none_after_its_end() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(LOAD);
        let log = LoadLog::start(run.path(), Idle).unwrap();
        while rows(&path).is_empty() {
            std::thread::yield_now();
        }
        drop(log);
        let found = rows(&path);
        assert_eq!(found[0]["sandbox/under_way"], 3);
        assert!(found[0]["process/memory_bytes"].as_u64() > Some(1 << 20));
        assert!(
            found[0]["host/memory_bytes"].as_u64() <= found[0]["host/memory_total_bytes"].as_u64()
        );
        assert!(found[0].get("actor/in_use").is_none());
    }

    #[test]
    fn a_long_file_is_thinned_and_still_tells_of_the_whole_run() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(LOAD);
        let long: String = (0..10)
            .map(|time| format!("{{\"time\":{time}}}\n"))
            .collect();
        fs_err::write(&path, long).unwrap();
        thin(&path).unwrap();
        let times: Vec<u64> = rows(&path)
            .iter()
            .map(|row| row["time"].as_u64().unwrap())
            .collect();
        assert_eq!(times, [1, 3, 5, 7, 9]);
    }

    #[test]
    fn what_ended_between_two_looks_is_a_rate() {
        let mut last = Last {
            at: Instant::now() - Duration::from_secs(4),
            counters: Counters::read(),
            ended: Some(0),
        };
        let row = last.row(&Idle, Vec::new());
        let rate = row.per_second.unwrap();
        assert!((rate - 2.0).abs() < 0.5, "{rate}");
    }
}
