//! The host side of one guest: everything a store knows beyond its memory.

use bytesize::ByteSize;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::bridge::{Peer, Stage};
use super::budget::Budget;
use super::limits::{Limits, MemoryLimiter};
use super::science::Files;

/// 2026-01-01T00:00:00Z: where a guest's clock starts unless it is set.
const CLOCK_START_NS: u64 = 1_767_225_600_000_000_000;
/// What one reading of the clock takes, so that two readings differ.
const CLOCK_STEP_NS: u64 = 1_000;

/// The data of a guest's store.
///
/// A guest's clock and randomness are functions of its seed and of its own calls, so a program
/// does the same in every run, and a snapshot is the same bit for bit.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) stdin: Input,
    pub(super) stdout: Capture,
    pub(super) stderr: Capture,
    pub(super) memory: MemoryLimiter,
    /// What a fork gets a copy of.
    pub(super) carried: Carried,
    /// When the current call has to end.
    pub(super) budget: Budget,
    /// The guest that this one reaches through `bridge.call`.
    pub(super) peer: Peer,
    /// What this guest's peers are made from, if it may ask for new ones.
    pub(super) stage: Option<Box<Stage>>,
    /// The peer's last reply, until the guest takes it.
    pub(super) reply: Vec<u8>,
    /// Why the guest has ended, while frames of it are still on the stack: each host function that
    /// would return into one returns this instead.
    pub(super) doom: Option<wasmtime::Error>,
}

/// The part of the host's state that belongs to the guest's program: with its memory, it decides
/// what the program does next.
#[derive(Debug, Clone)]
pub(super) struct Carried {
    pub(super) clock: Clock,
    pub(super) random: ChaCha8Rng,
    /// Whether the last program had arguments, which the next one must not see.
    pub(super) has_arguments: bool,
    /// The files of a guest that does not keep them in its own memory.
    pub(super) files: Option<Box<Files>>,
}

impl Host {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            stdin: Input::default(),
            stdout: Capture::new(limits.stdout),
            stderr: Capture::new(limits.stderr),
            memory: MemoryLimiter::new(limits.memory),
            carried: Carried {
                clock: Clock::default(),
                random: ChaCha8Rng::seed_from_u64(0),
                has_arguments: false,
                files: None,
            },
            budget: Budget::default(),
            peer: Peer::None,
            stage: None,
            reply: Vec::new(),
            doom: None,
        }
    }

    /// Takes what was printed to standard output or, otherwise, to standard error.
    pub(super) fn take_printed(&mut self, is_stdout: bool) -> Vec<u8> {
        let stream = if is_stdout {
            &mut self.stdout
        } else {
            &mut self.stderr
        };
        stream.take().0
    }

    pub(super) fn seed(&mut self, seed: u64) {
        self.carried.random = ChaCha8Rng::seed_from_u64(seed);
    }

    pub(super) fn fill_random(&mut self, bytes: &mut [u8]) {
        self.carried.random.fill_bytes(bytes);
    }
}

/// Standard input: bytes, and how many of them were read.
#[derive(Debug, Default)]
pub(super) struct Input {
    bytes: Vec<u8>,
    position: usize,
}

impl Input {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, position: 0 }
    }

    /// Copies the next bytes into `buffer` and returns their number; 0 is the end.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.position += count;
        count
    }
}

/// An output stream that keeps its first bytes and drops the rest.
#[derive(Debug)]
pub(super) struct Capture {
    bytes: Vec<u8>,
    limit: usize,
    truncated: bool,
}

impl Capture {
    fn new(limit: ByteSize) -> Self {
        Self {
            bytes: Vec::new(),
            limit: usize::try_from(limit.0).unwrap_or(usize::MAX),
            truncated: false,
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(self.limit - self.bytes.len());
        self.truncated |= kept < bytes.len();
        self.bytes.extend_from_slice(&bytes[..kept]);
    }

    /// Returns what was written and whether something was dropped, and starts anew.
    pub(super) fn take(&mut self) -> (Vec<u8>, bool) {
        (
            std::mem::take(&mut self.bytes),
            std::mem::take(&mut self.truncated),
        )
    }
}

/// A clock that moves only when it is read or slept on, and while the guest on the other side of the
/// bridge lets time pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Clock {
    pub(super) elapsed_ns: u64,
    /// The wall clock when nothing had elapsed.
    pub(super) start_ns: u64,
    /// What had elapsed when the round began, in which two guests share the time.
    round_start_ns: u64,
    /// What the other guest let pass in the round.
    others_ns: u64,
}

impl Default for Clock {
    fn default() -> Self {
        Self::at(0, CLOCK_START_NS)
    }
}

impl Clock {
    /// Makes a clock by which `elapsed_ns` have elapsed since the wall clock said `start_ns`.
    pub(super) fn at(elapsed_ns: u64, start_ns: u64) -> Self {
        Self {
            elapsed_ns,
            start_ns,
            round_start_ns: 0,
            others_ns: 0,
        }
    }

    /// Begins a round, and forgets the time that the other guest of the last one let pass: what
    /// happens in a round is not seen in the next.
    pub(super) fn begin_round(&mut self) {
        self.elapsed_ns -= std::mem::take(&mut self.others_ns);
        self.round_start_ns = self.elapsed_ns;
    }

    /// Returns what has elapsed in the round.
    pub(super) fn round_ns(&self) -> u64 {
        self.elapsed_ns - self.round_start_ns
    }

    /// Lets the time pass that it was before for the other guest of the round. One of the two waits
    /// while the other runs, so whoever is ahead has the time of both.
    pub(super) fn catch_up(&mut self, round_ns: u64) {
        let before = self.elapsed_ns;
        let now = self.round_start_ns.saturating_add(round_ns);
        self.elapsed_ns = before.max(now);
        self.others_ns = (self.others_ns).saturating_add(self.elapsed_ns - before);
    }

    /// Reads the wall clock (nanoseconds since 1970) or, otherwise, a clock that starts at 0.
    pub(super) fn read(&mut self, is_realtime: bool) -> u64 {
        self.elapsed_ns = self.elapsed_ns.saturating_add(CLOCK_STEP_NS);
        self.now(is_realtime)
    }

    pub(super) fn now(&self, is_realtime: bool) -> u64 {
        let start = if is_realtime { self.start_ns } else { 0 };
        self.elapsed_ns.saturating_add(start)
    }

    /// Sets the wall clock, to seconds since 1970.
    pub(super) fn set_wall(&mut self, seconds: u64) {
        self.start_ns = seconds
            .saturating_mul(1_000_000_000)
            .saturating_sub(self.elapsed_ns);
    }

    /// Sleeps, in no time.
    pub(super) fn advance(&mut self, nanoseconds: u64) {
        self.elapsed_ns = self.elapsed_ns.saturating_add(nanoseconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_keeps_its_first_bytes() {
        let mut capture = Capture::new(ByteSize(5));
        capture.write(b"abc");
        capture.write(b"defg");
        assert_eq!(capture.take(), (b"abcde".to_vec(), true));
        capture.write(b"next");
        assert_eq!(capture.take(), (b"next".to_vec(), false));
    }

    #[test]
    fn input_ends() {
        let mut input = Input::new(b"abc".to_vec());
        let mut buffer = [0; 2];
        assert_eq!(input.read(&mut buffer), 2);
        assert_eq!(input.read(&mut buffer), 1);
        assert_eq!(input.read(&mut buffer), 0);
    }

    #[test]
    fn equal_seeds_give_equal_bytes() {
        let draw = |seed| {
            let mut host = Host::new(&Limits::default());
            host.seed(seed);
            let mut bytes = [0; 16];
            host.fill_random(&mut bytes);
            bytes
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn the_wall_clock_can_be_set() {
        let mut clock = Clock::default();
        clock.advance(7_000_000_000);
        let monotonic = clock.now(false);
        clock.set_wall(86_400);
        assert_eq!(clock.now(true), 86_400_000_000_000);
        assert_eq!(clock.now(false), monotonic);
    }

    #[test]
    fn two_guests_of_a_round_share_the_time() {
        let [mut tests, mut submission] = [7, 500].map(|elapsed_ns| {
            let mut clock = Clock::default();
            clock.advance(elapsed_ns);
            clock.begin_round();
            clock
        });
        tests.advance(10);
        submission.catch_up(tests.round_ns());
        submission.advance(3);
        tests.catch_up(submission.round_ns());
        assert_eq!((tests.now(false), submission.now(false)), (20, 513));
        // The next round has a submission of its own, and the tests' own time only.
        tests.begin_round();
        assert_eq!((tests.now(false), tests.round_ns()), (17, 0));
    }

    #[test]
    fn a_clock_at_its_end_stays_there() {
        let mut clock = Clock::default();
        clock.advance(5);
        clock.begin_round();
        clock.catch_up(u64::MAX);
        assert_eq!(clock.now(false), u64::MAX);
        clock.begin_round();
        assert_eq!(clock.now(false), 5);
    }

    #[test]
    fn the_clock_moves_by_sleep_and_reading_only() {
        let mut clock = Clock::default();
        let start = clock.read(true);
        clock.advance(5_000_000_000);
        assert_eq!(clock.read(true) - start, 5_000_000_000 + CLOCK_STEP_NS);
    }
}
