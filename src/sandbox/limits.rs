//! What a guest may use, and the limiter that enforces its memory.

use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use wasmtime::ResourceLimiter;

use super::error::SandboxError;

/// The most a 32-bit linear memory can hold.
const MAX_MEMORY: ByteSize = ByteSize::gib(4);
/// A deadline beyond this is a mistake in the configuration: a sandboxed call is seconds long.
const MAX_DEADLINE: Duration = Duration::from_hours(24);
/// Meters count in an `i64`.
const MAX_FUEL: u64 = i64::MAX as u64;

/// What one guest may use; what it does not grant is denied.
///
/// `memory` holds for the life of an interpreter; `fuel` and `deadline` are per call, so a
/// [`Session`](super::Session) gets them anew for every step. Fuel counts the work done, in units
/// of about one Wasm operator: 10⁹ is mostly 0.1 to 0.3 s of Python, and 1 s at most. It is the
/// limit to decide rewards by: the same program always uses the same amount. The deadline is
/// wall-clock time and depends on the machine's load; leave it so generous that fuel is used up
/// first.
///
/// # Examples
///
/// ```
/// use wardian::sandbox::Limits;
///
/// let limits = Limits { fuel: 1_000_000_000, ..Limits::default() };
/// limits.validate().unwrap();
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Linear memory, what the interpreter needs included: 40 MiB, 113 in the science runtime;
    /// default 256 MiB.
    #[serde(with = "super::byte_size")]
    pub memory: ByteSize,
    /// Units of work per call; default 20 billion, mostly two to six seconds of Python.
    pub fuel: u64,
    /// Wall-clock time per call; default 60 s.
    #[serde(rename = "deadline_seconds", with = "super::seconds")]
    pub deadline: Duration,
    /// Bytes of standard output kept per call, the rest is dropped; default 1 MiB.
    #[serde(with = "super::byte_size")]
    pub stdout: ByteSize,
    /// Bytes of standard error kept per call, the rest is dropped; default 1 MiB.
    #[serde(with = "super::byte_size")]
    pub stderr: ByteSize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: ByteSize::mib(256),
            fuel: 20_000_000_000,
            deadline: Duration::from_secs(60),
            stdout: ByteSize::mib(1),
            stderr: ByteSize::mib(1),
        }
    }
}

impl Limits {
    /// Checks that each limit can be enforced.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::InvalidLimit`] for the first limit that is zero or beyond what
    /// Wasm can hold.
    pub fn validate(&self) -> Result<(), SandboxError> {
        let invalid = |name, reason| Err(SandboxError::InvalidLimit { name, reason });
        if self.memory.0 == 0 || self.memory > MAX_MEMORY {
            return invalid(
                "memory",
                format!("must be in 1 B..={MAX_MEMORY}, is {}", self.memory),
            );
        }
        if self.fuel == 0 || self.fuel > MAX_FUEL {
            return invalid(
                "fuel",
                format!("must be in 1..={MAX_FUEL}, is {}", self.fuel),
            );
        }
        if self.deadline.is_zero() || self.deadline > MAX_DEADLINE {
            return invalid(
                "deadline_seconds",
                format!(
                    "must be above 0 and at most {MAX_DEADLINE:?}, is {:?}",
                    self.deadline
                ),
            );
        }
        for (name, size) in [("stdout", self.stdout), ("stderr", self.stderr)] {
            if size > MAX_MEMORY {
                return invalid(name, format!("must be at most {MAX_MEMORY}, is {size}"));
            }
        }
        Ok(())
    }
}

/// Enforces a store's memory limit and remembers that it was met.
///
/// Python turns a denied `memory.grow` into a `MemoryError`, which a program may catch; so a
/// denial alone ends nothing.
#[derive(Debug)]
pub(super) struct MemoryLimiter {
    limit: u64,
    /// The largest size that was asked for and denied.
    denied: Option<u64>,
}

impl MemoryLimiter {
    pub(super) fn new(limit: ByteSize) -> Self {
        Self {
            limit: limit.0,
            denied: None,
        }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn denied(&self) -> Option<u64> {
        self.denied
    }

    /// Forgets denials, at the start of a call.
    pub(super) fn reset(&mut self) {
        self.denied = None;
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let desired = desired as u64;
        let granted = desired <= self.limit;
        if !granted {
            self.denied = self.denied.max(Some(desired));
        }
        Ok(granted)
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        // The guest's table is made with the instance; nothing in it grows tables afterwards.
        Ok(current == 0 || desired <= current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        Limits::default().validate().unwrap();
    }

    #[test]
    fn a_zero_limit_is_named() {
        let limits = Limits {
            fuel: 0,
            ..Limits::default()
        };
        let message = limits.validate().expect_err("zero fuel").to_string();
        assert!(message.contains("`fuel`"), "{message}");
    }

    #[test]
    fn limits_read_sizes_and_seconds() {
        let limits: Limits =
            serde_json::from_str(r#"{"memory": "64 MiB", "deadline_seconds": 1.5}"#).unwrap();
        assert_eq!(limits.memory, ByteSize::mib(64));
        assert_eq!(limits.deadline, Duration::from_millis(1500));
        assert_eq!(limits.fuel, Limits::default().fuel);
    }

    #[test]
    fn limits_are_written_without_loss() {
        let limits = Limits {
            memory: ByteSize(105_436_417),
            deadline: Duration::from_nanos(1_000_000_007),
            stdout: ByteSize(70_001),
            ..Limits::default()
        };
        let json = serde_json::to_string(&limits).unwrap();
        assert_eq!(serde_json::from_str::<Limits>(&json).unwrap(), limits);
    }

    #[test]
    fn an_unknown_limit_is_refused() {
        let error = serde_json::from_str::<Limits>(r#"{"feul": 1}"#).unwrap_err();
        assert!(error.to_string().contains("feul"), "{error}");
    }

    #[test]
    fn the_limiter_remembers_the_largest_denial() {
        let mut limiter = MemoryLimiter::new(ByteSize::mib(1));
        assert!(limiter.memory_growing(0, 1 << 20, None).unwrap());
        assert!(!limiter.memory_growing(0, 3 << 20, None).unwrap());
        assert!(!limiter.memory_growing(0, 2 << 20, None).unwrap());
        assert_eq!(limiter.denied(), Some(3 << 20));
    }
}
