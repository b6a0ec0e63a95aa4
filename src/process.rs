//! Programs of this machine: each has an input, a bounded output and an end.

use std::collections::VecDeque;
use std::io::{Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// Time between looks at whether it has ended.
const POLL: Duration = Duration::from_millis(2);
/// How long output may stay open once the program has ended: what it left behind may hold it.
pub(crate) const DRAIN: Duration = Duration::from_millis(200);
/// How long it may take to end once what it waits for was killed.
const GRACE: Duration = Duration::from_secs(3);

/// Returns where a program is, as a shell would find it.
pub(crate) fn find_program(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return name.is_file().then(|| name.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}

/// What was kept of a stream: all of it, or its beginning and its end.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Captured {
    /// Its beginning.
    pub head: Vec<u8>,
    /// How many bytes are left out between the two.
    pub dropped: u64,
    /// Its end; empty where nothing is left out.
    pub tail: Vec<u8>,
}

impl Captured {
    /// Whether bytes are left out.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.dropped > 0
    }

    /// Returns it as text, with a line where bytes are left out.
    #[must_use]
    pub fn text(&self) -> String {
        let head = String::from_utf8_lossy(&self.head);
        if !self.is_truncated() {
            return head.into_owned();
        }
        let tail = String::from_utf8_lossy(&self.tail);
        format!("{head}\n[{} bytes left out]\n{tail}", self.dropped)
    }
}

impl std::fmt::Debug for Captured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.text(), f)
    }
}

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// None if it had to be killed.
    pub(crate) status: Option<ExitStatus>,
    /// Whether it was ended: its time was over, or who watched it said so.
    pub(crate) timed_out: bool,
    pub(crate) stdout: Captured,
    pub(crate) stderr: Captured,
}

impl Finished {
    /// Whether it ended by itself, in time, with 0.
    pub(crate) fn is_success(&self) -> bool {
        !self.timed_out && self.status.is_some_and(|status| status.success())
    }
}

/// Returns the moment that is `time` from now, or one that nobody lives to see.
pub(crate) fn deadline(time: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    Instant::now() + time.min(CENTURY)
}

/// Runs `command` with `stdin`. Once `timeout` is over, or `watch`, which is asked again and again, says so,
/// `kill` is called, which should end it; soon after it is killed with its process group. Both are given its
/// number.
///
/// # Errors
///
/// Fails where it cannot be started.
pub(crate) fn run(
    command: &mut Command,
    stdin: &[u8],
    timeout: Duration,
    max_output: usize,
    mut watch: impl FnMut(Pid) -> bool,
    kill: impl FnOnce(Pid),
) -> std::io::Result<Finished> {
    let input = match stdin {
        [] => Stdio::null(),
        _ => Stdio::piped(),
    };
    command
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut group = Group::start(command)?;
    let stdout = Stream::read(group.leader.stdout.take(), max_output);
    let stderr = Stream::read(group.leader.stderr.take(), max_output);
    if let Some(mut pipe) = group.leader.stdin.take() {
        let bytes = stdin.to_vec();
        // Who does not read it to its end has its reasons.
        std::thread::spawn(move || pipe.write_all(&bytes));
    }
    let pid = group.pid;
    let until = deadline(timeout);
    let mut ended = group.wait(|| Instant::now() >= until || watch(pid))?;
    let timed_out = !ended;
    if timed_out {
        kill(pid);
        let until = Instant::now() + GRACE;
        ended = group.wait(|| Instant::now() >= until)?;
    }
    let status = group.end()?;
    let until = Instant::now() + DRAIN;
    Ok(Finished {
        status: ended.then_some(status),
        timed_out,
        stdout: stdout.finish(until),
        stderr: stderr.finish(until),
    })
}

/// A program in a process group of its own, which ends with this.
pub(crate) struct Group {
    /// The program. It must not be waited for but here: once it was, its number may be another's.
    pub(crate) leader: Child,
    pid: Pid,
    is_collected: bool,
}

impl Group {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be started.
    pub(crate) fn start(command: &mut Command) -> std::io::Result<Self> {
        let leader = command.process_group(0).spawn()?;
        let number = i32::try_from(leader.id()).ok().and_then(Pid::from_raw);
        Ok(Self {
            leader,
            pid: number.expect("the kernel gives positive numbers"),
            is_collected: false,
        })
    }

    /// Waits until the program has ended, or `is_over`; returns whether it has ended.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be looked after.
    pub(crate) fn wait(&self, mut is_over: impl FnMut() -> bool) -> std::io::Result<bool> {
        // Not collected: as long as it is there, so is its group, and no other has its number.
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            if waitid(WaitId::Pid(self.pid), look)?.is_some() {
                return Ok(true);
            }
            if is_over() {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Ends all that is left of the group, and returns how the program ended.
    ///
    /// # Errors
    ///
    /// Fails where it cannot be waited for.
    pub(crate) fn end(mut self) -> std::io::Result<ExitStatus> {
        self.kill();
        self.leader.wait()
    }

    fn kill(&mut self) {
        if !std::mem::replace(&mut self.is_collected, true) {
            // All of them may be gone.
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.is_collected {
            self.kill();
            let _ = self.leader.wait();
        }
    }
}

/// A stream that is read on a thread of its own for as long as it is open.
pub(crate) struct Stream {
    kept: Arc<Mutex<Kept>>,
    reader: JoinHandle<()>,
}

/// What is kept of a stream while it is read.
#[derive(Debug)]
pub(crate) struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    dropped: u64,
    max: usize,
}

impl Kept {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            head: Vec::new(),
            tail: VecDeque::new(),
            dropped: 0,
            max,
        }
    }

    /// Keeps `bytes`: the first half of what may be kept for ever, of the rest the end.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let room = (self.max / 2).saturating_sub(self.head.len());
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(first);
        self.tail.extend(rest);
        let surplus = self.tail.len().saturating_sub(self.max - self.max / 2);
        self.tail.drain(..surplus);
        self.dropped += surplus as u64;
    }

    /// Returns what was kept; what comes then is thrown away.
    pub(crate) fn take(&mut self) -> Captured {
        let mut head = std::mem::take(&mut self.head);
        let mut tail = Vec::from(std::mem::take(&mut self.tail));
        self.max = 0;
        if self.dropped == 0 {
            head.append(&mut tail);
        }
        Captured {
            head,
            dropped: self.dropped,
            tail,
        }
    }
}

impl Stream {
    pub(crate) fn read(stream: Option<impl Read + Send + 'static>, max: usize) -> Self {
        let kept = Arc::new(Mutex::new(Kept::new(max)));
        let writer = Arc::clone(&kept);
        let reader = std::thread::spawn(move || {
            let Some(mut stream) = stream else { return };
            let mut buffer = [0; 64 << 10];
            loop {
                match stream.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(read) => {
                        let mut kept = writer.lock().unwrap_or_else(PoisonError::into_inner);
                        kept.add(&buffer[..read]);
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => return,
                }
            }
        });
        Self { kept, reader }
    }

    /// Returns what was kept once the stream has ended, or at `until`; what comes then is thrown away.
    pub(crate) fn finish(self, until: Instant) -> Captured {
        while !self.reader.is_finished() && Instant::now() < until {
            std::thread::sleep(POLL);
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn sh(script: &str, stdin: &[u8], timeout: Duration, max: usize) -> Finished {
        run(
            Command::new("sh").args(["-c", script]),
            stdin,
            timeout,
            max,
            |_| false,
            |_| (),
        )
        .unwrap()
    }

    #[test]
    fn input_and_both_outputs_are_carried() {
        let finished = sh("cat; echo no >&2; exit 3", b"hello", LONG, 100);
        assert_eq!(finished.status.unwrap().code(), Some(3));
        assert_eq!(finished.stdout.text(), "hello");
        assert_eq!(finished.stderr.text(), "no\n");
        assert!(!finished.timed_out && !finished.stdout.is_truncated());
    }

    #[test]
    fn input_that_nobody_reads_is_no_trouble() {
        let finished = sh("exit 0", &vec![0; 1 << 20], LONG, 100);
        assert!(finished.is_success());
    }

    #[test]
    fn output_is_cut_in_the_middle() {
        let finished = sh("printf 0123456789; printf abcdefghij", b"", LONG, 10);
        let expected = Captured {
            head: b"01234".to_vec(),
            dropped: 10,
            tail: b"fghij".to_vec(),
        };
        assert_eq!(finished.stdout, expected);
        assert_eq!(expected.text(), "01234\n[10 bytes left out]\nfghij");
        let finished = sh("printf 0123456789", b"", LONG, 10);
        assert_eq!(finished.stdout.head, b"0123456789");
    }

    #[test]
    fn what_runs_over_its_time_is_killed_with_what_it_started() {
        let started = Instant::now();
        let mut killed = false;
        let finished = run(
            Command::new("sh").args(["-c", "trap '' TERM; sleep 1000 & echo $!; wait"]),
            b"",
            Duration::from_millis(300),
            100,
            |_| false,
            |_| killed = true,
        )
        .unwrap();
        assert!(killed && finished.timed_out && finished.status.is_none());
        assert!(started.elapsed() < LONG);
        let pid = finished.stdout.text().trim().to_owned();
        let is_gone = || {
            let stat = fs_err::read_to_string(format!("/proc/{pid}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z "))
        };
        // A kill is on its way when the call returns.
        while !is_gone() {
            assert!(started.elapsed() < LONG, "process {pid} is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_a_program_leaves_in_its_group_ends_with_it() {
        let finished = sh("sleep 1000 >/dev/null 2>&1 & echo $!", b"", LONG, 100);
        assert!(finished.is_success());
        let stat = format!("/proc/{}/stat", finished.stdout.text().trim());
        let started = Instant::now();
        while !fs_err::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z ")) {
            assert!(started.elapsed() < LONG, "it still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_is_left_behind_holds_nobody_up() {
        let started = Instant::now();
        let finished = sh("setsid sleep 5 & echo done", b"", LONG, 100);
        assert!(finished.is_success());
        assert_eq!(finished.stdout.text(), "done\n");
        assert!(started.elapsed() < Duration::from_secs(4));
    }
}
