//! How much memory this process may still take.

use std::path::Path;

use candle_core::Device;

/// Returns the bytes of a device's memory that may still be taken. `None` where nobody tells.
#[must_use]
pub fn available_memory(device: &Device) -> Option<u64> {
    match device {
        Device::Cpu => main_memory(),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let free = device.cuda_stream().context().mem_get_info();
            free.ok().map(|(free, _total)| free as u64)
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => None,
        Device::Metal(_) => None,
    }
}

/// Returns what the system has left, or the control group of this process (a container's limit), if
/// that is less.
fn main_memory() -> Option<u64> {
    let read = |path: &str| fs_err::read_to_string(Path::new(path)).ok();
    let system = read("/proc/meminfo").as_deref().and_then(mem_available);
    let group = "/sys/fs/cgroup/memory";
    let limit = read(&format!("{group}.max")).as_deref().and_then(number);
    let used = read(&format!("{group}.current"))
        .as_deref()
        .and_then(number);
    // What was read of files counts as used, and is given back when memory is wanted.
    let files = read(&format!("{group}.stat"))
        .as_deref()
        .and_then(inactive_file)
        .unwrap_or(0);
    let group = limit
        .zip(used)
        .map(|(limit, used)| limit.saturating_sub(used.saturating_sub(files)));
    match (system, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (system, group) => system.or(group),
    }
}

/// Reads the line `MemAvailable: 123 kB`.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Reads the line `inactive_file 123` of a control group's counts.
fn inactive_file(stat: &str) -> Option<u64> {
    let line = stat
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "))?;
    number(line)
}

/// Reads a number of a control group; `max` is no limit.
fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_read() {
        let meminfo = "MemTotal:  100 kB\nMemAvailable:   42 kB\nBuffers: 1 kB\n";
        assert_eq!(mem_available(meminfo), Some(42 * 1024));
        assert_eq!(mem_available("MemTotal: 1 kB"), None);
        assert_eq!(
            inactive_file("anon 1\ninactive_file 77\nactive_file 2\n"),
            Some(77)
        );
        assert_eq!(inactive_file("anon 1\n"), None);
        assert_eq!(number("max\n"), None);
        assert_eq!(number("4096\n"), Some(4096));
        let available = available_memory(&Device::Cpu).expect("Linux tells it");
        assert!(available > 1 << 20, "{available}");
    }
}
