//! The GPUs of the machine, as `nvidia-smi` tells of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::process::{find_program, run};

/// How long an answer may take: a driver that hangs holds nobody up but the thread that asks.
const PATIENCE: Duration = Duration::from_secs(3);
/// The longest answer.
const MAX_ANSWER: usize = 64 << 10;
/// Failures in a row after which it is asked no more.
const MAX_FAILURES: u32 = 3;

/// A GPU as of now.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Gpu {
    /// Its number.
    index: u32,
    /// Share of the last second or so in which it computed; none where it does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<f64>,
    /// Memory that is taken, by all, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_total_bytes: Option<u64>,
}

/// Who tells of GPUs.
#[derive(Debug)]
pub(super) struct Gpus {
    program: Option<PathBuf>,
    failures: u32,
}

impl Gpus {
    /// Finds out whether there is somebody to ask.
    pub(super) fn find() -> Self {
        Self {
            program: find_program(Path::new("nvidia-smi")),
            failures: 0,
        }
    }

    /// Returns what is told; nothing where nobody answers in time. It waits no longer once `is_over`.
    pub(super) fn look(&mut self, is_over: &dyn Fn() -> bool) -> Vec<Gpu> {
        let Some(program) = &self.program else {
            return Vec::new();
        };
        let mut command = Command::new(program);
        command.args([
            "--query-gpu=index,utilization.gpu,memory.used,memory.total",
            "--format=csv,noheader,nounits",
        ]);
        let asked = run(
            &mut command,
            b"",
            PATIENCE,
            MAX_ANSWER,
            |_| is_over(),
            |_| (),
        );
        let answer = asked.ok().filter(|answer| answer.is_success());
        let Some(answer) = answer else {
            self.failures += 1;
            if self.failures >= MAX_FAILURES {
                tracing::debug!("`nvidia-smi` does not answer and is asked no more");
                self.program = None;
            }
            return Vec::new();
        };
        self.failures = 0;
        parse(&answer.stdout.text())
    }
}

/// Reads lines such as `0, 87, 10240, 81559`, memory in MiB; what a GPU does not tell is in brackets.
fn parse(table: &str) -> Vec<Gpu> {
    let gpus = table.lines().filter_map(|line| {
        let mut fields = line.split(',').map(str::trim);
        let index = fields.next()?.parse().ok()?;
        let mut number = || fields.next()?.parse::<u32>().ok();
        let percent = number();
        let mut bytes = || number().map(|mebibytes| u64::from(mebibytes) << 20);
        let (memory_bytes, memory_total_bytes) = (bytes(), bytes());
        Some(Gpu {
            index,
            used: percent.map(|percent| f64::from(percent) / 100.0),
            memory_bytes,
            memory_total_bytes,
        })
    });
    gpus.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_table_is_read_with_what_a_gpu_does_not_tell() {
        let found = parse("0, 87, 1024, 2048\n1, [N/A], [Not Supported], 2048\nNo devices\n");
        let first = Gpu {
            index: 0,
            used: Some(0.87),
            memory_bytes: Some(1 << 30),
            memory_total_bytes: Some(2 << 30),
        };
        let second = Gpu {
            index: 1,
            used: None,
            memory_bytes: None,
            ..first
        };
        assert_eq!(found, [first, second]);
    }

    fn program(folder: &Path, script: &str) -> Gpus {
        let path = folder.join("nvidia-smi");
        fs_err::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Gpus {
            program: Some(path),
            failures: 0,
        }
    }

    #[test]
    fn who_fails_is_asked_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let mut gpus = program(folder.path(), "echo 0, 1, 2, 3");
        assert_eq!(gpus.look(&|| false).len(), 1);
        let mut broken = program(folder.path(), "exit 9");
        for _ in 0..MAX_FAILURES {
            assert!(broken.program.is_some());
            assert_eq!(broken.look(&|| false), []);
        }
        assert_eq!(broken.program, None);
    }

    #[test]
    fn who_hangs_is_left_once_nobody_wants_to_know() {
        let folder = tempfile::tempdir().unwrap();
        let mut hanging = program(folder.path(), "echo asked > \"$0.asked\"; exec sleep 1000");
        let asked = folder.path().join("nvidia-smi.asked");
        assert_eq!(hanging.look(&|| asked.exists()), []);
        assert!(asked.exists(), "it was asked");
    }
}
