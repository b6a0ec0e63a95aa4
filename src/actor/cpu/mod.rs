//! What bounds the CPU time of an actor on this machine.
//!
//! Where this user may make control groups, each actor has one: it gets no more than it may, and actors that want all
//! there is share it evenly, however many processes each has. In version 2 they are made below this process's own group
//! alone, which has to be without processes of its own for that: what bounds the group bounds the actors. Elsewhere an
//! actor is bound to as many processors as it may use, of those that this process has, and yields to everything that is
//! not an actor.

mod group;

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use fs_err as fs;

use self::group::{Group, Groups};
use super::{ActorError, ActorLimits};
use crate::process::find_program;

/// How much actors without groups yield to others, of at most 19.
const NICE: &str = "5";

/// Gives the actors of a run their CPU time.
#[derive(Debug)]
pub(super) struct CpuTime {
    groups: Option<Groups>,
    /// The processors that this process may use.
    processors: Vec<usize>,
    /// Which of them the next actor begins at, where there are no groups.
    next: AtomicUsize,
}

impl CpuTime {
    /// Finds out whether the run with this folder can have groups, and removes those that crashed runs left.
    pub(super) fn open(run: &Path) -> Self {
        let groups = Groups::open(run);
        if groups.is_none() {
            tracing::info!(
                "this user cannot make control groups: actors are bound to processors in their place, and those of \
                 `bwrap` can undo it"
            );
        }
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let allowed = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        Self {
            groups,
            processors: allowed.map(numbers).unwrap_or_default(),
            // Other runs of this machine begin elsewhere.
            next: AtomicUsize::new(rand::random_range(0..1 << 16)),
        }
    }

    /// Returns what an actor may use.
    pub(super) fn share(&self, name: &str, limits: &ActorLimits) -> CpuShare {
        if let Some(groups) = &self.groups {
            match groups.make(name, limits.cpu_millis) {
                Ok(group) => return CpuShare::Group(group),
                Err(error) => tracing::warn!(%error, "an actor has no control group"),
            }
        }
        let there = self.processors.len();
        let asked = usize::try_from(limits.cpu_millis.div_ceil(1000)).unwrap_or(there);
        let count = asked.max(1).min(there);
        let first = self.next.fetch_add(count, Ordering::Relaxed);
        let listed = (first..first + count).map(|turn| self.processors[turn % there].to_string());
        CpuShare::Bound(listed.collect::<Vec<_>>().join(","))
    }
}

/// The CPU time of an actor, for as long as this lives.
#[derive(Debug)]
pub(super) enum CpuShare {
    /// A control group.
    Group(Group),
    /// Processors, as `taskset` lists them; empty where it is not known which there are.
    Bound(String),
}

impl CpuShare {
    /// Returns a command that runs `program` within it; its arguments are still to come.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut words: Vec<OsString> = match self {
            Self::Group(group) => group.words(),
            Self::Bound(processors) => {
                let tools = find_program(Path::new("taskset")).zip(find_program(Path::new("nice")));
                match tools.filter(|_| !processors.is_empty()) {
                    Some((taskset, nice)) => vec![
                        nice.into(),
                        "-n".into(),
                        NICE.into(),
                        taskset.into(),
                        "-c".into(),
                        processors.into(),
                    ],
                    None => Vec::new(),
                }
            }
        };
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Checks that what was run by a [command](Self::command) did run within it.
    ///
    /// # Errors
    ///
    /// Fails where it was not run at all, since it could not be within.
    pub(super) fn check(&self) -> Result<(), ActorError> {
        match self {
            Self::Group(group) => group.check(),
            Self::Bound(_) => Ok(()),
        }
    }

    /// Lets what runs within come before what other actors run, or no longer; without groups nothing does.
    pub(super) fn come_first(&self, is_first: bool) {
        if let Self::Group(group) = self {
            group.come_first(is_first);
        }
    }
}

/// Returns the numbers of a list of the kernel's, as `0-3,8`.
fn numbers(list: &str) -> Vec<usize> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Whichever way there is here, a program that takes all it can get has no more than its share.
    #[test]
    fn what_runs_within_a_share_gets_no_more() {
        let run = tempfile::tempdir().unwrap();
        let time = CpuTime::open(run.path());
        let limits = ActorLimits {
            cpu_millis: 100,
            ..ActorLimits::default()
        };
        let share = time.share("a", &limits);
        // Or a machine that is busy gives it less than it may have.
        share.come_first(true);
        let mut command = share.command(Path::new("/bin/sh"));
        command.args([
            "-c",
            "for _ in 1 2 3; do (while :; do :; done) & done; wait",
        ]);
        command.env_clear().env("PATH", "/usr/bin:/bin");
        let mut group = crate::process::Group::start(&mut command).unwrap();
        let status = |name: &str| {
            let text = fs::read_to_string(format!("/proc/{}/status", group.leader.id())).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().to_owned()
        };
        let until = Instant::now() + Duration::from_secs(60);
        match &share {
            CpuShare::Group(group) => loop {
                let stat = fs::read_to_string(group.path.join("cpu.stat")).unwrap();
                let line = stat
                    .lines()
                    .find_map(|line| line.strip_prefix("nr_throttled "));
                if line.unwrap().trim() != "0" {
                    break;
                }
                assert!(Instant::now() < until, "it was never held back: {stat}");
                std::thread::sleep(Duration::from_millis(10));
            },
            CpuShare::Bound(_) => {
                while !status("Cpus_allowed_list:")
                    .bytes()
                    .all(|b| b.is_ascii_digit())
                {
                    assert!(Instant::now() < until, "it is not bound");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        share.check().unwrap();
        group.leader.kill().unwrap();
        group.end().unwrap();
        drop(share);
        let left = time.groups.iter().flat_map(|groups| {
            let entries = fs::read_dir(&groups.place).unwrap().flatten();
            let is_own = |name: &str| name.starts_with(&groups.prefix);
            entries.filter(move |entry| is_own(&entry.file_name().to_string_lossy()))
        });
        assert_eq!(left.count(), 0);
    }

    #[test]
    fn processors_are_given_out_in_turn_where_there_are_no_groups() {
        let of = |processors: Vec<usize>| CpuTime {
            groups: None,
            processors,
            next: AtomicUsize::new(0),
        };
        let listed = |time: &CpuTime, cpu_millis| {
            let limits = ActorLimits {
                cpu_millis,
                ..ActorLimits::default()
            };
            match &time.share("a", &limits) {
                CpuShare::Bound(listed) => listed.clone(),
                CpuShare::Group(_) => unreachable!("there are none"),
            }
        };
        // Those of this process, whatever their numbers.
        let time = of(numbers("\t4-6,9\n"));
        assert_eq!(listed(&time, 500), "4");
        assert_eq!(listed(&time, 2000), "5,6");
        assert_eq!(listed(&time, 1500), "9,4");
        assert_eq!(listed(&time, u32::MAX).split(',').count(), 4);
        assert_eq!(listed(&of(Vec::new()), 1000), "");
        let run = |share: &CpuShare| {
            let mut command = share.command(Path::new("/bin/sh"));
            command.args(["-c", "grep Cpus_allowed_list /proc/self/status"]);
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        let first = CpuTime::open(tempfile::tempdir().unwrap().path()).processors[0];
        let told = run(&CpuShare::Bound(first.to_string()));
        assert!(told.trim().ends_with(&format!("\t{first}")), "{told}");
        // Where nobody knows, it runs all the same.
        assert!(run(&CpuShare::Bound(String::new())).starts_with("Cpus_allowed_list"));
    }
}
