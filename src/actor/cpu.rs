//! What bounds the CPU time of an actor on this machine.
//!
//! Where this user may make control groups, each actor has one: it gets no more than it may, and actors that want all
//! there is share it evenly, however many processes each has. In version 2 they are made below this process's own group
//! alone, which has to be without processes of its own for that: what bounds the group bounds the actors. Elsewhere an
//! actor is bound to as many processors as it may use, of those that this process has, and yields to everything that is
//! not an actor.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fs_err as fs;

use super::ActorLimits;
use crate::process::find_program;

/// What the groups of all runs begin with.
const PREFIX: &str = "wardian-";
/// The time over which CPU time is given out, in microseconds; the kernel's own default.
const PERIOD: u64 = 100_000;
/// How long the processes of a group may take to be gone.
const GONE: Duration = Duration::from_secs(1);
/// How much actors without groups yield to others, of at most 19.
const NICE: &str = "5";

/// Enters a group and becomes a program: as a script, since nothing else runs between the two. A group that is gone,
/// by the doing of somebody else on this machine, holds nobody up.
const ENTER: &str = r#"echo $$ 2>/dev/null > "$0"; exec "$@""#;

/// A version of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Gives the actors of a run their CPU time.
#[derive(Debug)]
pub(super) struct CpuTime {
    /// The group that those of actors are made in, and what their names begin with. They are made beside each
    /// other: one for the run around them would weigh as little as a single process of somebody else.
    groups: Option<(Version, PathBuf, String)>,
    /// The processors that this process may use.
    processors: Vec<usize>,
    /// Which of them the next actor begins at, where there are no groups.
    next: AtomicUsize,
}

impl CpuTime {
    /// Finds out whether the run with this folder can have groups, and removes those that crashed runs left.
    pub(super) fn open(run: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let name = run.file_name().unwrap_or_default().to_string_lossy();
        let places = places(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        let groups = places.into_iter().find_map(|(version, place)| {
            remove_left(&place);
            let prefix = format!("{PREFIX}{name}-");
            // Whether it works at all is told by trying.
            let tried = place.join(format!("{prefix}try"));
            let made = make(version, &tried, 1000);
            let _ = fs::remove_dir(&tried);
            made.ok()?;
            Some((version, place, prefix))
        });
        if groups.is_none() {
            tracing::info!(
                "this user cannot make control groups: actors are bound to processors in their place, and those of \
                 `bwrap` can undo it"
            );
        }
        let status = read("/proc/self/status");
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
        if let Some((version, place, prefix)) = &self.groups {
            let group = place.join(format!("{prefix}{name}"));
            match make(*version, &group, limits.cpu_millis) {
                Ok(()) => return CpuShare::Group(group),
                Err(error) => {
                    tracing::warn!(%error, "an actor has no control group");
                    let _ = fs::remove_dir(&group);
                }
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
    Group(PathBuf),
    /// Processors, as `taskset` lists them; empty where it is not known which there are.
    Bound(String),
}

impl CpuShare {
    /// Returns a command that runs `program` within it; its arguments are still to come.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut words: Vec<OsString> = match self {
            Self::Group(group) => {
                let entry = group.join("cgroup.procs");
                vec!["/bin/sh".into(), "-c".into(), ENTER.into(), entry.into()]
            }
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
}

impl Drop for CpuShare {
    fn drop(&mut self) {
        if let Self::Group(group) = self {
            remove(group);
        }
    }
}

/// Returns the groups in which others may be made, the likeliest first: this process's own, and in version 1, where
/// that of CPU time bounds nothing else, the topmost one.
fn places(mounts: &str, own: &str) -> Vec<(Version, PathBuf)> {
    let mut places = Vec::new();
    for line in mounts.lines() {
        let Some((mount, system)) = line.split_once(" - ") else {
            continue;
        };
        let mut system = system.split(' ');
        let version = match (system.next(), system.nth(1)) {
            (Some("cgroup2"), _) => Version::Two,
            (Some("cgroup"), Some(options)) if options.split(',').any(|one| one == "cpu") => {
                Version::One
            }
            _ => continue,
        };
        let fields: Vec<&str> = mount.split(' ').collect();
        let (Some(root), Some(point)) = (fields.get(3), fields.get(4)) else {
            continue;
        };
        let group = own.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let is_its = match version {
                Version::One => controllers.split(',').any(|one| one == "cpu"),
                Version::Two => controllers.is_empty(),
            };
            is_its.then_some(path)
        });
        let inside = group.and_then(|group| Path::new(group).strip_prefix(root).ok());
        let topmost = PathBuf::from(point);
        let own = inside.map_or_else(|| topmost.clone(), |inside| topmost.join(inside));
        let others = (version == Version::One).then_some(topmost);
        for place in [own].into_iter().chain(others) {
            // Without the stroke that joining nothing leaves.
            let place: PathBuf = place.components().collect();
            if !places.contains(&(version, place.clone())) {
                places.push((version, place));
            }
        }
    }
    places
}

/// Returns the numbers of a list of the kernel's, as `0-3,8`.
fn numbers(list: &str) -> Vec<usize> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

/// Makes a group that gets so many thousandths of a CPU.
fn make(version: Version, group: &Path, millis: u32) -> std::io::Result<()> {
    if let (Version::Two, Some(above)) = (version, group.parent()) {
        // The group above has to pass the controller on, which one that has processes cannot.
        fs::write(above.join("cgroup.subtree_control"), "+cpu")?;
    }
    fs::create_dir(group)?;
    // The kernel takes no less than a millisecond.
    let quota = (u64::from(millis) * PERIOD / 1000).max(1000);
    let write = |name: &str, value: String| fs::write(group.join(name), value);
    // A CPU weighs as much as a process of anybody else.
    let weight = |one: u64, most: u64| (one * u64::from(millis) / 1000).clamp(2, most).to_string();
    match version {
        Version::One => {
            write("cpu.shares", weight(1024, 262_144))?;
            write("cpu.cfs_period_us", PERIOD.to_string())?;
            write("cpu.cfs_quota_us", quota.to_string())
        }
        Version::Two => {
            write("cpu.weight", weight(100, 10_000))?;
            write("cpu.max", format!("{quota} {PERIOD}"))
        }
    }
}

/// Removes a group, once their processes are gone.
fn remove(group: &Path) {
    let until = Instant::now() + GONE;
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
            Err(error) if Instant::now() >= until => {
                tracing::warn!(%error, "a control group is left over");
                return;
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Removes the groups of runs whose process is gone; the run's folder, which it is named for, begins with its number.
fn remove_left(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let run = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let process = run.and_then(|run| run.split_once('-')?.0.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // Where a process is left in it, it stays: it is of somebody who sees other numbers.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_looked_for_where_this_process_is() {
        let first = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                     32 31 0:29 /a /sys/fs/cgroup/cpu rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n\
                     35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let found = places(first, "3:memory:/x\n1:cpu,cpuacct:/a/b\n0::/\n");
        let path = |path: &str| PathBuf::from(path);
        assert_eq!(
            found,
            [
                (Version::One, path("/sys/fs/cgroup/cpu/b")),
                (Version::One, path("/sys/fs/cgroup/cpu")),
            ]
        );
        let second = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            places(second, "0::/\n"),
            [(Version::Two, path("/sys/fs/cgroup"))]
        );
        // What bounds the service bounds its actors.
        assert_eq!(
            places(second, "0::/a.service\n"),
            [(Version::Two, path("/sys/fs/cgroup/a.service"))]
        );
        assert_eq!(places("", "0::/\n"), []);
    }

    /// Whichever way there is here, a program that takes all it can get has no more than its share.
    #[test]
    fn what_runs_within_a_share_gets_no_more() {
        let time = CpuTime::open(Path::new("/tmp/0-test-of-shares"));
        let limits = ActorLimits {
            cpu_millis: 100,
            ..ActorLimits::default()
        };
        let share = time.share("a", &limits);
        if let (CpuShare::Group(group), Some((version, ..))) = (&share, &time.groups) {
            // Or a machine that is busy gives it less than it may have.
            let (name, most) = match version {
                Version::One => ("cpu.shares", "262144"),
                Version::Two => ("cpu.weight", "10000"),
            };
            fs::write(group.join(name), most).unwrap();
        }
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
            CpuShare::Group(path) => loop {
                let stat = fs::read_to_string(path.join("cpu.stat")).unwrap();
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
        group.leader.kill().unwrap();
        group.end().unwrap();
        drop(share);
        let left = time.groups.iter().flat_map(|(_, place, prefix)| {
            let entries = fs::read_dir(place).unwrap().flatten();
            entries.filter(move |entry| entry.file_name().to_string_lossy().starts_with(prefix))
        });
        assert_eq!(left.count(), 0);
    }

    #[test]
    fn groups_of_runs_that_crashed_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let live = format!("wardian-{}-a-a0", std::process::id());
        // No process has so large a number.
        for name in [
            "wardian-4294967295-a-a0",
            "wardian-of-others",
            "other",
            &live,
        ] {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        remove_left(place.path());
        let mut left: Vec<_> = fs::read_dir(place.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(
            left,
            ["other".to_owned(), live, "wardian-of-others".to_owned()]
        );
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
        let first = CpuTime::open(Path::new("/tmp/0-test-of-processors")).processors[0];
        let told = run(&CpuShare::Bound(first.to_string()));
        assert!(told.trim().ends_with(&format!("\t{first}")), "{told}");
        // Where nobody knows, it runs all the same.
        assert!(run(&CpuShare::Bound(String::new())).starts_with("Cpus_allowed_list"));
    }
}
