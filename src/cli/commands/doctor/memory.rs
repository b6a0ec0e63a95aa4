//! Main memory: what is there, what a container leaves of it, and what the run asks.

use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use candle_core::Device as TensorDevice;
use fs_err as fs;

use super::Scope;
use super::finding::Finding;
use crate::config::Device;
use crate::engine::available_memory;
use crate::run::{keep_to_budget, plan_request};
use crate::trainer::{Place, PlanRequest, plan};

/// What the sandbox and a small model take.
const LEAST: u64 = 1 << 30;

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let Some(free) = available_memory(&TensorDevice::Cpu) else {
        return vec![Finding::note(
            "memory",
            "the system does not tell how much there is",
        )];
    };
    let limit = group_limit(Path::new("/"));
    let within = match limit {
        Some(limit) => format!(" (the control group's limit is {})", ByteSize(limit)),
        None => String::new(),
    };
    let free = free.min(limit.unwrap_or(u64::MAX));
    let mut findings = Vec::new();
    let (wanted, what) = match wanted(scope) {
        Ok(Some(bytes)) => (bytes, "this run takes by calculation"),
        Ok(None) => (LEAST, "the sandbox and a small model take"),
        Err(reason) => {
            let fix = format!("wardian plan{} --memory SIZE", scope.options);
            findings.push(Finding::wrong("memory", reason, fix));
            (LEAST, "the sandbox and a small model take")
        }
    };
    let about = format!(
        "{} may still be taken{within}; {what} {}",
        ByteSize(free),
        ByteSize(wanted)
    );
    findings.push(match free < wanted {
        false => Finding::fine("memory", about),
        true if scope.model.is_some() => Finding::wrong(
            "memory",
            about,
            format!(
                "--set trainer.memory_budget={}MiB, a lower `rollout.max_cache_tokens`, or `model.dtype`; \
                 `wardian plan{}` shows where it goes",
                free * 9 / 10 / bytesize::MIB,
                scope.options
            ),
        ),
        true => Finding::wrong("memory", about, "end other programs, or raise the container's limit"),
    });
    findings
}

/// Returns what the run takes of main memory, where its model is here.
fn wanted(scope: &Scope) -> Result<Option<u64>, String> {
    let config = &scope.config;
    // A program for GPUs takes one if there is one.
    let may_be_elsewhere =
        config.model.device == Device::Cuda || candle_core::utils::cuda_is_available();
    let Some(model) = scope
        .model
        .as_ref()
        .filter(|_| !may_be_elsewhere || config.model.device == Device::Cpu)
    else {
        return Ok(None);
    };
    let request = plan_request(config, model, Place::Cpu);
    let chosen = keep_to_budget(config, model, &request).map_err(|error| error.to_string())?;
    let request = PlanRequest {
        micro_batch_tokens: chosen.micro_batch_tokens,
        recompute: chosen.recompute,
        ..request
    };
    Ok(Some(plan(model, &request).peak()))
}

/// Returns the lowest limit of this process' control group and those above it, below `root`.
fn group_limit(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mut limits = Vec::new();
    for line in groups.lines() {
        // `0::/path` of version 2, `5:memory:/path` of version 1.
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next(), parts.next()?, parts.next()?);
        let (base, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let base = root.join(base);
        let mut folder: PathBuf = base.join(path.trim_start_matches('/'));
        while folder.starts_with(&base) {
            let limit = fs::read_to_string(folder.join(file)).ok();
            limits.extend(limit.and_then(|text| text.trim().parse::<u64>().ok()));
            if !folder.pop() {
                break;
            }
        }
    }
    // Version 1 writes a number near 2^63 for no limit.
    limits.into_iter().min().filter(|limit| *limit < 1 << 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_the_groups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(group_limit(root.path()), None);
        write("proc/self/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(group_limit(root.path()), None);
        write("sys/fs/cgroup/a/memory.max", "2147483648\n");
        write("sys/fs/cgroup/a/b/memory.max", "4294967296\n");
        assert_eq!(group_limit(root.path()), Some(2 << 30));
        write("proc/self/cgroup", "5:cpu,memory:/pod\n1:name=x:/y\n");
        let file = "sys/fs/cgroup/memory/pod/memory.limit_in_bytes";
        write(file, "9223372036854771712\n");
        assert_eq!(group_limit(root.path()), None);
        write(file, "536870912\n");
        assert_eq!(group_limit(root.path()), Some(512 << 20));
    }
}
