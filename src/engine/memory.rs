//! How much memory this process has, and how much it may still take.

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

/// Returns whether an error says that a device had no memory left for a tensor. What was allocated before
/// is whole, so that work that asks for less can go on.
#[must_use]
pub fn is_out_of_memory(error: &(dyn std::error::Error + 'static)) -> bool {
    // By name: the types are those of a library that is there only in builds for a GPU, behind layers
    // of contexts that the tensor library adds.
    const NAMES: [&str; 2] = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"];
    let mut cause = Some(error);
    while let Some(error) = cause {
        let text = error.to_string();
        if NAMES.iter().any(|name| text.contains(name)) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Measures the most main memory that this process has at a time.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeakMemory;

impl PeakMemory {
    /// Begins anew, and returns the bytes that are held now; `None` where the system cannot do that.
    #[must_use]
    pub fn restart() -> Option<u64> {
        // Linux sets the peak to what is resident (proc(5), since 4.0).
        fs_err::write("/proc/self/clear_refs", "5").ok()?;
        of_status("VmRSS:")
    }

    /// Gives memory that waits for its next use back to the system: it counts as held.
    pub fn release() {
        super::model::ops::free_unused();
        #[cfg(target_env = "gnu")]
        #[expect(
            unsafe_code,
            reason = "a call of the C library, whose allocator keeps what is freed"
        )]
        // SAFETY: it may be called at any time by any thread, and changes nothing that is in use.
        unsafe {
            libc::malloc_trim(0);
        }
    }

    /// Returns the most bytes that were held since; `None` where nobody tells.
    #[must_use]
    pub fn read() -> Option<u64> {
        of_status("VmHWM:")
    }
}

fn of_status(key: &str) -> Option<u64> {
    kilobytes(&fs_err::read_to_string("/proc/self/status").ok()?, key)
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
    kilobytes(meminfo, "MemAvailable:")
}

/// Reads the line of a key, such as `VmRSS:   123 kB`, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
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

    #[test]
    fn a_peak_is_that_since_the_last_restart() {
        // More than what other tests of this process may hold for a while.
        let large = 512 << 20;
        let hold = || {
            let mut block = vec![0_u8; large];
            // Pages are there once they are written.
            block.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            std::hint::black_box(&block);
        };
        let before = PeakMemory::restart().expect("Linux tells it");
        hold();
        let peak = PeakMemory::read().expect("Linux tells it");
        assert!(peak >= before + large as u64 / 2, "{peak} after {before}");
        PeakMemory::restart().expect("Linux tells it");
        let after = PeakMemory::read().expect("Linux tells it");
        assert!(after + large as u64 / 2 <= peak, "{after} after {peak}");
    }

    #[test]
    fn a_full_device_is_known_behind_any_context() {
        let full = || {
            let text = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
            candle_core::Error::Cuda(text.into())
        };
        assert!(is_out_of_memory(&full()));
        assert!(is_out_of_memory(&full().context("matmul").bt()));
        let model = crate::engine::model::ModelError::from(full());
        assert!(is_out_of_memory(&model));
        assert!(!is_out_of_memory(&candle_core::Error::Msg("shape".into())));
    }
}
