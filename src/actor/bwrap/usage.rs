//! What the processes below one use, counted from outside.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use fs_err as fs;
use rustix::process::Pid;

use crate::actor::{ActorLimits, Ending};

/// Processes that the namespaces have of their own.
pub(super) const OWN: u32 = 3;

/// A process, as far as it is counted.
struct Row {
    parent: i32,
    threads: u64,
    /// Resident memory, in bytes.
    memory: u64,
}

/// Returns how a command ends whose processes, those below `top`, or files, those in `folder`, are more than
/// they may be.
pub(super) fn over(top: Pid, folder: &Path, limits: &ActorLimits) -> Option<Ending> {
    let rows = rows();
    let mut below: HashSet<i32> = HashSet::from([top.as_raw_nonzero().get()]);
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for (pid, row) in &rows {
        children.entry(row.parent).or_default().push(*pid);
    }
    let mut open: Vec<i32> = below.iter().copied().collect();
    while let Some(pid) = open.pop() {
        for child in children.get(&pid).into_iter().flatten() {
            if below.insert(*child) {
                open.push(*child);
            }
        }
    }
    let counted = || below.iter().filter_map(|pid| rows.get(pid));
    let threads: u64 = counted().map(|row| row.threads).sum();
    let most = u64::from(limits.processes + OWN);
    if threads > most {
        return Some(Ending::Killed {
            reason: format!("it had {threads} processes and threads, of at most {most}"),
        });
    }
    let memory = counted().map(|row| row.memory).sum();
    if memory > limits.memory {
        return Some(Ending::OutOfMemory {
            limit: limits.memory,
            used: memory,
        });
    }
    let Some(written) = size(folder) else {
        return Some(Ending::Killed {
            reason: "its folders are too deep to count what it wrote".to_owned(),
        });
    };
    let written = written + deleted(&below, folder);
    (written > limits.disk).then(|| Ending::Killed {
        reason: format!("it wrote {written} bytes, of at most {}", limits.disk),
    })
}

/// Returns all processes of this machine.
fn rows() -> HashMap<i32, Row> {
    let page = rustix::param::page_size() as u64;
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers
        .filter_map(|pid: i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The second field is a name in brackets, which may hold anything.
            let (_, fields) = stat.rsplit_once(") ")?;
            let fields: Vec<&str> = fields.split(' ').collect();
            let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
            let row = Row {
                parent: fields.get(1)?.parse().ok()?,
                threads: number(17)?,
                memory: number(21)? * page,
            };
            Some((pid, row))
        })
        .collect()
}

/// The longest path that can be looked at with a name of 255 bytes behind it, of the 4096 of the kernel.
const MAX_PATH: usize = 4096 - 1 - 256;

/// What an entry takes, however little is in it.
const ENTRY: u64 = 4096;

/// Returns the bytes on disk of what is in a folder, unless it is too deep to be looked at; links are not
/// followed.
fn size(folder: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut bytes = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        if folder.as_os_str().len() > MAX_PATH {
            return None;
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(status) = entry.metadata() else {
                continue;
            };
            bytes += (status.blocks() * 512).max(ENTRY);
            if status.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    Some(bytes)
}

/// Returns the bytes on disk of files that have no name any more, and are still open in one of the processes. Only
/// those of the file system that `folder` is in are what was written there.
fn deleted(processes: &HashSet<i32>, folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(device) = fs::metadata(folder).map(|about| about.dev()) else {
        return 0;
    };
    let open = processes.iter().flat_map(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"));
        files.into_iter().flatten().flatten()
    });
    let files: HashMap<u64, u64> = open
        .filter_map(|file| fs::metadata(file.path()).ok())
        .filter(|about| about.nlink() == 0 && about.dev() == device && about.is_file())
        .map(|about| (about.ino(), about.blocks() * 512))
        .collect();
    files.values().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_name_any_more_is_counted_while_it_is_open() {
        let scratch = crate::actor::Scratch::new().unwrap();
        let own = HashSet::from([i32::try_from(std::process::id()).unwrap()]);
        let path = scratch.path().join("file");
        fs::write(&path, vec![1; 100_000]).unwrap();
        let open = fs::File::open(&path).unwrap();
        // Other tests of this process may have such files, too, but hardly of this size.
        let before = deleted(&own, scratch.path());
        fs::remove_file(&path).unwrap();
        assert!(deleted(&own, scratch.path()) >= before + 100_000);
        drop(open);
        assert!(deleted(&own, scratch.path()) < before + 100_000);
    }

    #[test]
    fn what_cannot_be_counted_is_told_from_nothing() {
        let scratch = crate::actor::Scratch::new().unwrap();
        fs::write(scratch.path().join("file"), [1; 5000]).unwrap();
        assert_eq!(size(scratch.path()), Some(8192));
        fs::write(scratch.path().join("empty"), "").unwrap();
        assert_eq!(size(scratch.path()), Some(8192 + ENTRY));
        // Deeper than a path can say.
        let name = "n".repeat(200);
        let deep = scratch.path().join("deep");
        for _ in 0..30 {
            let above = scratch.path().join("above");
            fs::create_dir(&above).unwrap();
            if deep.exists() {
                fs::rename(&deep, above.join(&name)).unwrap();
            }
            fs::rename(&above, &deep).unwrap();
        }
        assert_eq!(size(scratch.path()), None);
    }
}
