//! Ranks that talk over TCP, all through the root.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::handshake::Hello;
use super::join::{accept_all, connect, listen};
use super::sum::nodes_of;
use super::wire::{Frame, FrameError, MAX_MESSAGE, read_frame, write_frame};
use super::{Collective, CollectiveError, Launch, Numbers, OrderedSum};

/// Bytes of a sum that go over the wire at a time.
const SUM_BYTES: usize = 4 << 20;
/// How often somebody who waits looks up.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// How long the others may take to close their side, or to hear why they are not let in.
pub(super) const PARTING: Duration = Duration::from_secs(2);

/// How long is waited for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For all ranks to join; 10 minutes by default.
    pub joining: Duration,
    /// For a sign of life of a rank; a minute by default. It gives one ten times as often.
    pub silence: Duration,
    /// For a rank that lives to come to what the others do; an hour by default.
    pub patience: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            joining: Duration::from_secs(600),
            silence: Duration::from_secs(60),
            patience: Duration::from_secs(3600),
        }
    }
}

/// What a connection brought.
type Incoming = Result<(u64, String, Vec<u8>), CollectiveError>;

/// The side of a connection that is written to. Frames are written whole.
#[derive(Debug)]
struct Peer {
    rank: usize,
    writer: Mutex<TcpStream>,
}

impl Peer {
    fn send(&self, frame: &Frame) -> io::Result<()> {
        write_frame(&mut *lock(&self.writer), frame)
    }
}

/// What the threads of one rank share.
#[derive(Debug)]
struct Shared {
    rank: usize,
    peers: Vec<Peer>,
    /// Set by this process's own signals.
    signalled: Arc<AtomicBool>,
    /// Set once any rank is asked to stop, or is lost.
    stop: Arc<AtomicBool>,
    /// Set once a rank is lost or ends the run.
    #[cfg(feature = "nccl")]
    failed: AtomicBool,
    closing: AtomicBool,
}

impl Shared {
    /// Sends a frame to all connections but that of `except`; those that are gone are told of
    /// elsewhere.
    fn send_all(&self, frame: &Frame, except: Option<usize>) {
        for peer in &self.peers {
            if Some(peer.rank) != except {
                let _ = peer.send(frame);
            }
        }
    }
}

/// Ranks that talk over TCP. The root's process holds one connection to each other rank.
#[derive(Debug)]
pub struct TcpCollective {
    world_size: usize,
    timeouts: Timeouts,
    shared: Arc<Shared>,
    state: Mutex<State>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    incoming: Vec<Receiver<Incoming>>,
}

impl TcpCollective {
    /// Joins the processes of a launch, which must agree on `identity`, text in lines. `signalled` is
    /// what a signal sets.
    ///
    /// # Errors
    ///
    /// Fails where not all come in time, where they do not fit together, or where the port is taken.
    pub fn join(
        launch: &Launch,
        identity: &str,
        timeouts: Timeouts,
        signalled: Arc<AtomicBool>,
    ) -> Result<Self, CollectiveError> {
        let own = Hello::new(launch, identity);
        let streams = if launch.rank == 0 {
            let listener = listen(launch)?;
            accept_all(&listener, launch, &own, timeouts)?
        } else {
            vec![(0, connect(launch, &own, timeouts)?)]
        };
        Self::start(launch, streams, timeouts, signalled)
    }

    fn start(
        launch: &Launch,
        streams: Vec<(usize, TcpStream)>,
        timeouts: Timeouts,
        signalled: Arc<AtomicBool>,
    ) -> Result<Self, CollectiveError> {
        let mut readers = Vec::with_capacity(streams.len());
        let mut peers = Vec::with_capacity(streams.len());
        for (rank, stream) in streams {
            let prepared = stream
                .set_read_timeout(Some(timeouts.silence))
                .and_then(|()| stream.set_write_timeout(Some(timeouts.silence)))
                .and_then(|()| stream.set_nodelay(true))
                .and_then(|()| stream.try_clone());
            let writer = prepared.map_err(|error| lost(rank, "joining", &error))?;
            readers.push((rank, stream));
            peers.push(Peer {
                rank,
                writer: Mutex::new(writer),
            });
        }
        let shared = Arc::new(Shared {
            rank: launch.rank,
            peers,
            signalled,
            stop: Arc::new(AtomicBool::new(false)),
            #[cfg(feature = "nccl")]
            failed: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        });
        let mut incoming = Vec::new();
        let mut threads = Vec::new();
        for (rank, stream) in readers {
            let (sender, receiver) = channel();
            incoming.push(receiver);
            let shared = Arc::clone(&shared);
            threads.push(std::thread::spawn(move || {
                listen_to(rank, stream, &shared, &sender);
            }));
        }
        let of_life = Arc::clone(&shared);
        let every = timeouts.silence / 10;
        threads.push(std::thread::spawn(move || show_life(&of_life, every)));
        Ok(Self {
            world_size: launch.world_size,
            timeouts,
            shared,
            state: Mutex::new(State {
                sequence: 0,
                incoming,
            }),
            threads,
        })
    }

    /// Breaks off without a word, as a process that is killed.
    #[cfg(test)]
    pub(super) fn cut_for_tests(&self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        for peer in &self.shared.peers {
            let _ = lock(&peer.writer).shutdown(Shutdown::Both);
        }
    }

    /// Returns what is set once any rank is asked to stop.
    #[must_use]
    pub fn stop(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.stop)
    }

    /// Returns whether a rank was lost or ended the run.
    #[cfg(feature = "nccl")]
    pub(super) fn has_failed(&self) -> bool {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Sends this rank's part of an activity to a connection.
    fn send(
        &self,
        peer: usize,
        sequence: u64,
        activity: &'static str,
        payload: Vec<u8>,
    ) -> Result<(), CollectiveError> {
        let peer = &self.shared.peers[peer];
        let (found, limit) = (payload.len() as u64, MAX_MESSAGE);
        if found > limit {
            let rank = self.shared.rank;
            return Err(CollectiveError::TooLong { rank, found, limit });
        }
        let frame = Frame::Data {
            sequence,
            activity: activity.to_owned(),
            payload,
        };
        peer.send(&frame)
            .map_err(|error| lost(peer.rank, activity, &error))
    }

    /// Waits for a connection's part of an activity.
    fn receive(
        &self,
        state: &State,
        peer: usize,
        activity: &'static str,
    ) -> Result<Vec<u8>, CollectiveError> {
        let rank = self.shared.peers[peer].rank;
        let patience = self.timeouts.patience;
        let (sequence, found, payload) = match state.incoming[peer].recv_timeout(patience) {
            Ok(incoming) => match incoming {
                // The thread that found out does not know what it was waited for.
                Err(CollectiveError::Lost { rank, reason, .. }) => {
                    return Err(CollectiveError::Lost {
                        rank,
                        activity,
                        reason,
                    });
                }
                incoming => incoming?,
            },
            Err(RecvTimeoutError::Timeout) => {
                return Err(CollectiveError::Late {
                    rank,
                    activity,
                    seconds: patience.as_secs(),
                });
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CollectiveError::Lost {
                    rank,
                    activity,
                    reason: "it broke off before".to_owned(),
                });
            }
        };
        if (sequence, found.as_str()) != (state.sequence, activity) {
            return Err(CollectiveError::OutOfStep {
                rank,
                found: format!("{found} (number {sequence})"),
                expected: format!("{activity} (number {})", state.sequence),
            });
        }
        Ok(payload)
    }

    /// Gives each rank's bytes to the root, which answers all with what `combine` makes of them.
    fn through_root(
        &self,
        activity: &'static str,
        own: Vec<u8>,
        combine: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>, CollectiveError>,
    ) -> Result<Vec<u8>, CollectiveError> {
        let mut state = lock(&self.state);
        state.sequence += 1;
        let sequence = state.sequence;
        if self.shared.rank != 0 {
            // What the root said last explains a connection that it has closed.
            if let Err(error) = self.send(0, sequence, activity, own) {
                return Err(self.receive(&state, 0, activity).err().unwrap_or(error));
            }
            return self.receive(&state, 0, activity);
        }
        let mut all = vec![own];
        for peer in 0..self.shared.peers.len() {
            all.push(self.receive(&state, peer, activity)?);
        }
        let answer = combine(all)?;
        for peer in 0..self.shared.peers.len() {
            self.send(peer, sequence, activity, answer.clone())?;
        }
        Ok(answer)
    }

    /// Sums one stretch of the numbers.
    fn sum_stretch(
        &self,
        activity: &'static str,
        sum: &OrderedSum,
        stretch: Range<usize>,
    ) -> Result<Numbers, CollectiveError> {
        let kind = match sum.nodes().first() {
            Some((_, numbers)) => numbers.slice(stretch.start..stretch.start),
            None => return Err(missing(sum)),
        };
        let mut own = Vec::new();
        for (_, numbers) in sum.nodes() {
            numbers.slice(stretch.clone()).write_to(&mut own);
        }
        let bytes = stretch.len() * kind.width();
        let world_size = self.world_size;
        let total = sum.total();
        let combine = |all: Vec<Vec<u8>>| {
            let mut whole = OrderedSum::new(total);
            for (rank, payload) in all.iter().enumerate() {
                let share = rank * total / world_size..(rank + 1) * total / world_size;
                let nodes = nodes_of(&share, total);
                if payload.len() != nodes.len() * bytes {
                    let what = "parts of a sum";
                    return Err(CollectiveError::Malformed { rank, what });
                }
                for (node, payload) in nodes.into_iter().zip(payload.chunks_exact(bytes.max(1))) {
                    whole.push_node(node, kind.read_like(payload))?;
                }
            }
            let mut answer = Vec::with_capacity(bytes);
            whole.finish()?.write_to(&mut answer);
            Ok(answer)
        };
        let answer = self.through_root(activity, own, combine)?;
        if answer.len() != bytes {
            let (rank, what) = (0, "a sum");
            return Err(CollectiveError::Malformed { rank, what });
        }
        Ok(kind.read_like(&answer))
    }
}

impl Collective for TcpCollective {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(
        &self,
        activity: &'static str,
        bytes: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let combine = |all: Vec<Vec<u8>>| {
            let lengths = all.iter().map(|bytes| (bytes.len() as u64).to_le_bytes());
            let mut answer: Vec<u8> = lengths.flatten().collect();
            all.iter().for_each(|bytes| answer.extend(bytes));
            Ok(answer)
        };
        let answer = self.through_root(activity, bytes, combine)?;
        divide(&answer, self.world_size).ok_or(CollectiveError::Malformed {
            rank: 0,
            what: "gathered bytes",
        })
    }

    fn sum(&self, activity: &'static str, sum: OrderedSum) -> Result<Numbers, CollectiveError> {
        // The nodes of this rank's share, or it has left out some.
        let held = sum.nodes().iter().map(|(range, _)| range);
        let share = self.share(sum.total());
        let expected = nodes_of(&share, sum.total());
        let (Some((_, first)), true) = (sum.nodes().first(), held.eq(&expected)) else {
            return Err(missing(&sum));
        };
        let mut whole = first.zeros_like();
        let stretch = SUM_BYTES / whole.width();
        for start in (0..whole.len()).step_by(stretch) {
            let end = whole.len().min(start + stretch);
            whole.put(start, &self.sum_stretch(activity, &sum, start..end)?);
        }
        Ok(whole)
    }

    fn abort(&self, reason: &str) {
        let abort = Frame::Abort {
            rank: self.shared.rank,
            reason: reason.to_owned(),
        };
        self.shared.send_all(&abort, None);
    }
}

impl Drop for TcpCollective {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.send_all(&Frame::Bye, None);
        let shut = |how| {
            for peer in &self.shared.peers {
                let _ = lock(&peer.writer).shutdown(how);
            }
        };
        shut(Shutdown::Write);
        // Closed with something unread, a connection takes back what was sent last, which may say why.
        let started = Instant::now();
        while started.elapsed() < PARTING && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(TICK / 10);
        }
        shut(Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn lost(rank: usize, activity: &'static str, error: &io::Error) -> CollectiveError {
    let reason = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "it gives no sign of life".to_owned()
        }
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => "its connection broke off".to_owned(),
        _ => error.to_string(),
    };
    CollectiveError::Lost {
        rank,
        activity,
        reason,
    }
}

fn missing(sum: &OrderedSum) -> CollectiveError {
    CollectiveError::Parts {
        total: sum.total(),
        found: format!("{} nodes that are not this rank's share", sum.nodes().len()),
    }
}

/// Divides bytes into `count` pieces, whose lengths they begin with.
fn divide(bytes: &[u8], count: usize) -> Option<Vec<Vec<u8>>> {
    let (lengths, mut rest) = bytes.split_at_checked(count * 8)?;
    let mut pieces = Vec::with_capacity(count);
    for length in lengths.as_chunks::<8>().0 {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (piece, behind) = rest.split_at_checked(length)?;
        pieces.push(piece.to_vec());
        rest = behind;
    }
    rest.is_empty().then_some(pieces)
}

/// Reads what a rank sends until its connection ends.
fn listen_to(rank: usize, mut stream: TcpStream, shared: &Shared, sender: &Sender<Incoming>) {
    let relays = shared.rank == 0;
    loop {
        let mut is_done = false;
        let failure = match read_frame(&mut stream) {
            Ok(Frame::Data {
                sequence,
                activity,
                payload,
            }) => {
                if sender.send(Ok((sequence, activity, payload))).is_err() {
                    return;
                }
                continue;
            }
            Ok(Frame::Alive) => continue,
            Ok(Frame::Stop) => {
                shared.stop.store(true, Ordering::Relaxed);
                if relays {
                    shared.send_all(&Frame::Stop, Some(rank));
                }
                continue;
            }
            Ok(Frame::Abort { rank, reason }) => CollectiveError::Aborted { rank, reason },
            Ok(Frame::Bye) => {
                is_done = true;
                CollectiveError::Lost {
                    rank,
                    activity: "working",
                    reason: "it is done already".to_owned(),
                }
            }
            Err(FrameError::Io(error)) => lost(rank, "working", &error),
            Err(error) => CollectiveError::Lost {
                rank,
                activity: "working",
                reason: error.to_string(),
            },
        };
        if !is_done && !shared.closing.load(Ordering::Relaxed) {
            // Nothing that is sampled or computed from here on will be used.
            shared.stop.store(true, Ordering::Relaxed);
            #[cfg(feature = "nccl")]
            shared.failed.store(true, Ordering::Relaxed);
            if relays {
                let reason = match &failure {
                    CollectiveError::Aborted { reason, .. }
                    | CollectiveError::Lost { reason, .. } => reason.clone(),
                    failure => failure.to_string(),
                };
                shared.send_all(&Frame::Abort { rank, reason }, Some(rank));
            }
        }
        let _ = sender.send(Err(failure));
        return;
    }
}

/// Gives signs of life, and passes on that this process is asked to stop.
fn show_life(shared: &Shared, every: Duration) {
    let mut last = Instant::now();
    let mut has_told = false;
    while !shared.closing.load(Ordering::Relaxed) {
        if shared.signalled.load(Ordering::Relaxed) && !has_told {
            has_told = true;
            shared.stop.store(true, Ordering::Relaxed);
            shared.send_all(&Frame::Stop, None);
        }
        if last.elapsed() >= every {
            last = Instant::now();
            shared.send_all(&Frame::Alive, None);
        }
        std::thread::sleep(TICK.min(every));
    }
}
