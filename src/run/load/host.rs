//! CPU time and memory, as Linux counts them (proc(5)).

use serde::Serialize;

/// CPU time so far, in ticks of the system.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Counters {
    /// Of the machine: used, and in all.
    host: Option<(u64, u64)>,
    /// Of this process.
    process: Option<u64>,
}

impl Counters {
    pub(super) fn read() -> Self {
        let read = |path: &str| fs_err::read_to_string(path).ok();
        Self {
            host: read("/proc/stat").as_deref().and_then(host_ticks),
            process: read("/proc/self/stat").as_deref().and_then(process_ticks),
        }
    }

    /// Returns the share of the machine's CPU time that was used since `before`.
    pub(super) fn share_since(&self, before: &Self) -> Option<f64> {
        let ((used, all), (used_then, all_then)) = self.host.zip(before.host)?;
        let all = all.checked_sub(all_then).filter(|ticks| *ticks > 0)?;
        Some((used.saturating_sub(used_then) as f64 / all as f64).min(1.0))
    }

    /// Returns how many cores this process used in the `seconds` since `before`.
    pub(super) fn cores_since(&self, before: &Self, seconds: f64) -> Option<f64> {
        let ticks = self.process?.saturating_sub(before.process?) as f64;
        Some(ticks / rustix::param::clock_ticks_per_second() as f64 / seconds)
    }
}

/// Reads the line `cpu  user nice system idle iowait irq softirq steal …`. Guests are in `user` already.
fn host_ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Option<Vec<u64>> = (line.split_whitespace().take(8))
        .map(|number| number.parse().ok())
        .collect();
    let ticks = ticks?;
    let idle = ticks.get(3)? + ticks.get(4)?;
    let all: u64 = ticks.iter().sum();
    Some((all - idle, all))
}

/// Reads `utime` and `stime`. The second field may hold anything, and ends with the last parenthesis.
fn process_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Memory {
    /// Of the machine, without what would be given back if it were wanted.
    #[serde(rename = "host/memory_bytes", skip_serializing_if = "Option::is_none")]
    used: Option<u64>,
    #[serde(
        rename = "host/memory_total_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    total: Option<u64>,
    /// What this process holds.
    #[serde(
        rename = "process/memory_bytes",
        skip_serializing_if = "Option::is_none"
    )]
    process: Option<u64>,
}

impl Memory {
    pub(super) fn read() -> Self {
        let read = |path: &str| fs_err::read_to_string(path).unwrap_or_default();
        Self::of(&read("/proc/meminfo"), &read("/proc/self/status"))
    }

    fn of(meminfo: &str, status: &str) -> Self {
        let total = bytes_of(meminfo, "MemTotal:");
        let available = bytes_of(meminfo, "MemAvailable:");
        Self {
            used: total
                .zip(available)
                .map(|(total, left)| total.saturating_sub(left)),
            total,
            process: bytes_of(status, "VmRSS:"),
        }
    }
}

/// Reads the line of a key, such as `VmRSS:   123 kB`.
fn bytes_of(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_read_and_compared() {
        let stat = "cpu  100 20 30 800 40 5 5 0 60 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n";
        assert_eq!(host_ticks(stat), Some((160, 1000)));
        assert_eq!(host_ticks("intr 1"), None);
        let process = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 300 50 0 0";
        assert_eq!(process_ticks(process), Some(350));
        let of = |host, process| Counters {
            host: Some(host),
            process: Some(process),
        };
        let (before, now) = (of((100, 1000), 0), of((150, 1100), 300));
        assert_eq!(now.share_since(&before), Some(0.5));
        assert_eq!(now.share_since(&now), None);
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(now.cores_since(&before, 2.0), Some(300.0 / ticks / 2.0));
    }

    #[test]
    fn memory_is_read() {
        let found = Memory::of(
            "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   40 kB\n",
            "Name:\twardian\nVmRSS:\t   7 kB\n",
        );
        let expected = Memory {
            used: Some(60 << 10),
            total: Some(100 << 10),
            process: Some(7 << 10),
        };
        assert_eq!(found, expected);
        assert_eq!(Memory::of("", ""), Memory::default());
    }
}
