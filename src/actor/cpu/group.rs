//! Control groups: where they can be made, what bounds one, and that none is left behind.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fs_err as fs;

use crate::actor::ActorError;

/// What the groups of all runs begin with; the number of a namespace is next.
const PREFIX: &str = "wardian-ns";
/// The time over which CPU time is given out, in microseconds; the kernel's own default.
const PERIOD: u64 = 100_000;
/// How many times as much one weighs that comes before others.
const FIRST: u64 = 16;
/// How long the processes of a group may take to be gone before others are seen to.
const GONE: Duration = Duration::from_secs(1);
/// How long they may take at the end of a run.
const GONE_AT_LAST: Duration = Duration::from_secs(10);

/// Enters a group and becomes a program: as a script, since nothing else runs between the two. What cannot enter is
/// not run, and leaves a file that says so.
const ENTER: &str = r#"{ echo $$ > "$0"; } 2>/dev/null || { : > "$1"; exit 1; }; shift; exec "$@""#;

/// A version of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

/// Where the groups of a run's actors are made. They are made beside each other: one for the run around them would
/// weigh as little as a single process of somebody else.
#[derive(Debug)]
pub(super) struct Groups {
    pub(super) version: Version,
    pub(super) place: PathBuf,
    /// What the names of the run's groups begin with.
    pub(super) prefix: String,
    /// The run's own folder.
    run: PathBuf,
    left: Arc<Left>,
}

impl Groups {
    /// Finds out whether the run with this folder can have groups, and removes those that crashed runs left.
    pub(super) fn open(run: &Path) -> Option<Self> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let namespace = namespace();
        let name = run.file_name().unwrap_or_default().to_string_lossy();
        let own = namespace.as_deref().unwrap_or("0");
        let prefix = format!("{PREFIX}{own}-{name}-");
        let places = places(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        places.into_iter().find_map(|(version, place)| {
            if let Some(namespace) = &namespace {
                remove_left(&place, namespace);
            }
            // Whether it works at all is told by trying.
            let tried = place.join(format!("{prefix}try"));
            let made = make(version, &tried, 1000);
            let _ = fs::remove_dir(&tried);
            made.ok()?;
            Some(Self {
                version,
                place,
                prefix: prefix.clone(),
                run: run.to_owned(),
                left: Arc::default(),
            })
        })
    }

    /// Makes a group that gets so many thousandths of a CPU.
    pub(super) fn make(&self, name: &str, millis: u32) -> std::io::Result<Group> {
        let group = Group {
            path: self.place.join(format!("{}{name}", self.prefix)),
            not_entered: self.run.join(format!("{name}-not-entered")),
            version: self.version,
            millis,
            left: Arc::clone(&self.left),
        };
        // Dropped on a failure, it is removed.
        make(self.version, &group.path, millis)?;
        Ok(group)
    }
}

/// A group, for as long as this lives.
#[derive(Debug)]
pub(in crate::actor) struct Group {
    pub(super) path: PathBuf,
    /// A file that is there once something could not enter it.
    not_entered: PathBuf,
    version: Version,
    millis: u32,
    left: Arc<Left>,
}

impl Group {
    /// Lets what is in it come before what is in others, or no longer.
    pub(super) fn come_first(&self, is_first: bool) {
        let times = if is_first { FIRST } else { 1 };
        if let Err(error) = weigh(self.version, &self.path, self.millis, times) {
            tracing::debug!(%error, "a control group weighs as much as before");
        }
    }

    /// Returns the words before those of a program that let it run in the group.
    pub(super) fn words(&self) -> Vec<OsString> {
        let entry = self.path.join("cgroup.procs");
        vec![
            "/bin/sh".into(),
            "-c".into(),
            ENTER.into(),
            entry.into(),
            self.not_entered.clone().into(),
        ]
    }

    /// Checks that what was run with its [words](Self::words) did run in it.
    pub(super) fn check(&self) -> Result<(), ActorError> {
        let is_there = self.path.is_dir();
        if is_there && fs::remove_file(&self.not_entered).is_err() {
            return Ok(());
        }
        Err(ActorError::Backend {
            activity: format!("entering the control group `{}`", self.path.display()),
            message: match is_there {
                true => "it takes no process".to_owned(),
                false => "somebody else has removed it".to_owned(),
            },
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.left.remove(&self.path);
    }
}

/// Groups whose processes were not gone in time. They are tried again whenever another is removed, and at the end.
#[derive(Debug, Default)]
struct Left(Mutex<Vec<PathBuf>>);

impl Left {
    fn remove(&self, group: &Path) {
        let has_gone = is_removed_within(group, GONE);
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|left| !is_removed(left));
        if !has_gone {
            left.push(group.to_owned());
        }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let left = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + GONE_AT_LAST;
        for group in left {
            if !is_removed_within(group, until.saturating_duration_since(Instant::now())) {
                tracing::warn!(
                    group = %group.display(),
                    "a control group still has processes; the next run removes it"
                );
            }
        }
    }
}

/// Removes a group once its processes are gone; returns whether it is.
fn is_removed_within(group: &Path, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        if is_removed(group) {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_removed(group: &Path) -> bool {
    match fs::remove_dir(group) {
        Ok(()) => true,
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Returns the number of this process's own namespace of process numbers.
fn namespace() -> Option<String> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    let digits = link.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?;
    (digits.parse::<u64>().is_ok()).then(|| digits.to_owned())
}

/// Removes the groups of runs of this namespace whose process is gone: others see other numbers. The run's folder, which
/// a group is named for, begins with its process's.
fn remove_left(place: &Path, namespace: &str) {
    let own = format!("{PREFIX}{namespace}-");
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let run = name.to_str().and_then(|name| name.strip_prefix(&own));
        let process = run.and_then(|run| run.split_once('-')?.0.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // Where a process is left in it, it stays.
            let _ = fs::remove_dir(entry.path());
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

/// Makes a group that gets so many thousandths of a CPU.
fn make(version: Version, group: &Path, millis: u32) -> std::io::Result<()> {
    if let (Version::Two, Some(above)) = (version, group.parent()) {
        // The group above has to pass the controller on, which one that has processes cannot.
        fs::write(above.join("cgroup.subtree_control"), "+cpu")?;
    }
    fs::create_dir(group)?;
    weigh(version, group, millis, 1)?;
    // The kernel takes no less than a millisecond.
    let quota = (u64::from(millis) * PERIOD / 1000).max(1000);
    let write = |name: &str, value: String| fs::write(group.join(name), value);
    match version {
        Version::One => {
            write("cpu.cfs_period_us", PERIOD.to_string())?;
            write("cpu.cfs_quota_us", quota.to_string())
        }
        Version::Two => write("cpu.max", format!("{quota} {PERIOD}")),
    }
}

/// Lets each of the thousandths of a CPU that a group may use weigh as much as so many processes of anybody else.
fn weigh(version: Version, group: &Path, millis: u32, times: u64) -> std::io::Result<()> {
    let (name, one, most) = match version {
        Version::One => ("cpu.shares", 1024, 262_144),
        Version::Two => ("cpu.weight", 100, 10_000),
    };
    let weight = (one * times * u64::from(millis) / 1000).clamp(2, most);
    fs::write(group.join(name), weight.to_string())
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

    /// Numbers of another namespace say nothing here: there its process may live.
    #[test]
    fn groups_of_runs_of_this_namespace_that_crashed_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let namespace = namespace().unwrap();
        // No process has so large a number.
        let crashed = format!("wardian-ns{namespace}-4294967295-a-a0");
        let live = format!("wardian-ns{namespace}-{}-a-a0", std::process::id());
        let mut kept = [
            "other",
            "wardian-4294967295-a-a0",
            "wardian-ns1-4294967295-a-a0",
            "wardian-of-others",
            &live,
        ];
        kept.sort_unstable();
        for name in kept.into_iter().chain([crashed.as_str()]) {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        remove_left(place.path(), &namespace);
        let mut left: Vec<_> = fs::read_dir(place.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, kept);
    }

    fn group(folder: &Path) -> Group {
        Group {
            path: folder.join("group"),
            not_entered: folder.join("not-entered"),
            version: Version::Two,
            millis: 2000,
            left: Arc::default(),
        }
    }

    /// Files stand in for those of the kernel.
    #[test]
    fn what_cannot_enter_its_group_is_not_run() {
        let folder = tempfile::tempdir().unwrap();
        let group = group(folder.path());
        let entry = group.path.join("cgroup.procs");
        let run = || {
            let words = group.words();
            let mut command = std::process::Command::new(&words[0]);
            command.args(&words[1..]).args(["echo", "it runs"]);
            let output = command.output().unwrap();
            (
                String::from_utf8(output.stdout).unwrap(),
                group.check().map_err(|error| error.to_string()),
            )
        };
        let (printed, checked) = run();
        assert_eq!(printed, "");
        assert!(checked.unwrap_err().contains("has removed it"));
        fs::create_dir(&group.path).unwrap();
        fs::write(&entry, "").unwrap();
        let _ = fs::remove_file(&group.not_entered);
        assert_eq!(run(), ("it runs\n".to_owned(), Ok(())));
        assert_ne!(fs::read_to_string(&entry).unwrap(), "");
        // One that refuses.
        fs::remove_file(&entry).unwrap();
        std::os::unix::fs::symlink("/dev/full", &entry).unwrap();
        let (printed, checked) = run();
        assert_eq!(printed, "");
        assert!(checked.unwrap_err().contains("takes no process"));
        group.check().expect("it is told once for each command");
        fs::remove_file(&entry).unwrap();
    }

    #[test]
    fn who_comes_first_weighs_more_for_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let group = group(folder.path());
        fs::create_dir(&group.path).unwrap();
        let weight = || fs::read_to_string(group.path.join("cpu.weight")).unwrap();
        group.come_first(true);
        assert_eq!(weight(), "3200");
        group.come_first(false);
        assert_eq!(weight(), "200");
        fs::remove_file(group.path.join("cpu.weight")).unwrap();
    }

    /// Processes of a busy machine take their time.
    #[test]
    fn groups_that_could_not_be_removed_are_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let [busy, other, last] = ["busy", "other", "last"].map(|name| folder.path().join(name));
        for group in [&busy, &other, &last] {
            fs::create_dir(group).unwrap();
        }
        // It cannot be removed while something is in it.
        fs::write(busy.join("process"), "").unwrap();
        let left = Left::default();
        left.remove(&busy);
        left.remove(&other);
        assert!(busy.exists() && !other.exists());
        fs::remove_file(busy.join("process")).unwrap();
        left.remove(&last);
        assert!(!busy.exists() && !last.exists());
        fs::create_dir(&busy).unwrap();
        fs::write(busy.join("process"), "").unwrap();
        left.remove(&busy);
        fs::remove_file(busy.join("process")).unwrap();
        drop(left);
        assert!(!busy.exists());
    }
}
