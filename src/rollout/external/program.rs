//! An agent as a process: where it runs, what it is given, and how it ends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::actor::bwrap::{self, Arguments, Network};
use crate::process::Group;

/// The most of each stream that is kept: its end.
const MAX_OUTPUT: usize = 64 << 10;
/// Time between looks at whether its output has.
const POLL: Duration = Duration::from_millis(5);
/// How long its output may stay open once it has ended: a process that it left behind may hold it.
const DRAIN: Duration = Duration::from_millis(500);
/// Where the folder of an episode is in a sandbox.
const SANDBOX_FOLDER: &str = "/episode";

/// What keeps an agent from the rest of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Namespaces, by `bwrap` (bubblewrap): of files it sees the system's programs and its own folder,
    /// and no process but its own. It has the machine's network.
    #[default]
    Bubblewrap,
    /// Nothing: it may do what this user may.
    None,
}

/// What runs.
#[derive(Debug)]
pub(super) struct Program<'a> {
    pub(super) command: &'a [String],
    pub(super) isolation: Isolation,
    /// Paths that a sandbox shows it, to read, besides the system's.
    pub(super) mounts: &'a [PathBuf],
    /// Its own folder.
    pub(super) folder: &'a Path,
    pub(super) timeout: Duration,
}

/// How it ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// None if its time was over.
    pub(super) status: Option<ExitStatus>,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl Ended {
    /// Returns how it ended, and the end of what it complained about, for a log.
    pub(super) fn describe(&self) -> String {
        let how = match self.status {
            None => "its time was over".to_owned(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("it exited with {code}"),
                (_, Some(signal)) => format!("signal {signal} ended it"),
                _ => "it ended".to_owned(),
            },
        };
        let stderr = String::from_utf8_lossy(&self.stderr);
        let last = stderr.trim_end().lines().next_back().unwrap_or_default();
        match last {
            "" => how,
            last => format!("{how}: {}", last.chars().take(300).collect::<String>()),
        }
    }
}

impl Program<'_> {
    /// Returns the path of its folder as it sees it.
    pub(super) fn seen_folder(&self) -> &Path {
        match self.isolation {
            Isolation::Bubblewrap => Path::new(SANDBOX_FOLDER),
            Isolation::None => self.folder,
        }
    }

    /// Runs it to its end, or until `stop`; `variables` are all that it has besides `PATH`, `LANG` and
    /// `HOME`.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be started.
    pub(super) fn run(
        &self,
        variables: &BTreeMap<String, String>,
        stop: &AtomicBool,
    ) -> std::io::Result<Ended> {
        let arguments = match self.isolation {
            Isolation::Bubblewrap => self.in_bubblewrap(),
            Isolation::None => self.command.iter().map(OsString::from).collect(),
        };
        let mut command = Command::new(&arguments[0]);
        command
            .args(&arguments[1..])
            .current_dir(self.folder)
            .env_clear()
            .envs(
                ["PATH", "LANG"]
                    .into_iter()
                    .filter_map(|name| Some((name, std::env::var_os(name)?))),
            )
            .env("HOME", self.seen_folder())
            .envs(variables)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut group = Group::start(&mut command)?;
        let stdout = keep_end(group.leader.stdout.take());
        let stderr = keep_end(group.leader.stderr.take());
        let until = Instant::now() + self.timeout;
        let in_time = group.wait(|| Instant::now() >= until || stop.load(Ordering::Relaxed))?;
        let status = group.end()?;
        Ok(Ended {
            status: in_time.then_some(status),
            stdout: drain(stdout),
            stderr: drain(stderr),
        })
    }

    fn in_bubblewrap(&self) -> Vec<OsString> {
        let mut arguments = Arguments::new(Network::Host);
        arguments.show_system();
        let files = self.command.iter().map(Path::new);
        for path in files.filter(|path| path.is_absolute() && path.is_file()) {
            arguments.require(path, path);
        }
        for path in self.mounts {
            arguments.require(path, path);
        }
        arguments.bind(self.folder, Path::new(SANDBOX_FOLDER));
        arguments.add(["--chdir", SANDBOX_FOLDER]);
        let mut all = vec![OsString::from(bwrap::PROGRAM)];
        all.extend(arguments.running(self.command));
        all
    }
}

/// Reads a stream to its end on a thread of its own, and keeps the last of it.
fn keep_end(stream: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let Some(mut stream) = stream else {
            return kept;
        };
        let mut buffer = [0; 8 << 10];
        while let Ok(read @ 1..) = stream.read(&mut buffer) {
            kept.extend_from_slice(&buffer[..read]);
            if kept.len() > 2 * MAX_OUTPUT {
                kept.drain(..kept.len() - MAX_OUTPUT);
            }
        }
        let surplus = kept.len().saturating_sub(MAX_OUTPUT);
        kept.drain(..surplus);
        kept
    })
}

/// Returns what was kept, unless somebody holds the stream open.
fn drain(reader: JoinHandle<Vec<u8>>) -> Vec<u8> {
    let until = Instant::now() + DRAIN;
    while !reader.is_finished() {
        if Instant::now() >= until {
            return Vec::new();
        }
        std::thread::sleep(POLL);
    }
    reader.join().unwrap_or_default()
}
