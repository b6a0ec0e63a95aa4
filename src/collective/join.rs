//! How the ranks find each other: the root listens, the others connect, and nobody works before all are
//! there.

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use super::handshake::{Hello, Stranger, introduce, read_verdict, receive, send_verdict};
use super::tcp::{PARTING, TICK, lost};
use super::{CollectiveError, Launch, Timeouts};

/// Opens the root's port.
pub(super) fn listen(launch: &Launch) -> Result<TcpListener, CollectiveError> {
    let address = launch.address();
    let bound = if launch.is_local() {
        TcpListener::bind(&address)
    } else {
        // The name may stand for an address that this machine does not know as its own.
        TcpListener::bind(("::", launch.port))
            .or_else(|_| TcpListener::bind(("0.0.0.0", launch.port)))
    };
    bound.map_err(|source| CollectiveError::Listen { address, source })
}

/// Waits until all other ranks have joined, and tells them so.
pub(super) fn accept_all(
    listener: &TcpListener,
    launch: &Launch,
    own: &Hello,
    timeouts: Timeouts,
) -> Result<Vec<(usize, TcpStream)>, CollectiveError> {
    let address = launch.address();
    let cannot = |source| CollectiveError::Listen {
        address: address.clone(),
        source,
    };
    listener.set_nonblocking(true).map_err(cannot)?;
    let started = Instant::now();
    let mut ranks: Vec<Option<TcpStream>> = (1..launch.world_size).map(|_| None).collect();
    let mut refused = None;
    let objection = loop {
        if ranks.iter().all(Option::is_some) {
            break None;
        }
        if started.elapsed() >= timeouts.joining {
            let missing = (1..).zip(&ranks).filter(|(_, stream)| stream.is_none());
            let missing: Vec<String> = missing.map(|(rank, _)| format!("rank {rank}")).collect();
            let missing = missing.join(", ");
            break Some(CollectiveError::Missing {
                missing,
                seconds: timeouts.joining.as_secs(),
                refused,
            });
        }
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(TICK);
                continue;
            }
            Err(error) => return Err(cannot(error)),
        };
        match greet(&mut stream, launch, own, timeouts) {
            Ok(hello) => match hello.rank.checked_sub(1).and_then(|at| ranks.get_mut(at)) {
                Some(place @ None) => *place = Some(stream),
                Some(Some(_)) | None => {
                    let reason = format!("two processes have `RANK` {}", hello.rank);
                    let _ = send_verdict(&mut stream, Some(&reason));
                    break Some(CollectiveError::Mismatch { reason });
                }
            },
            Err(Stranger::Unknown(reason)) => {
                tracing::warn!(reason, "a connection was turned away");
                refused = Some(reason);
            }
            Err(Stranger::Unfit(reason)) => {
                let _ = send_verdict(&mut stream, Some(&reason));
                break Some(CollectiveError::Mismatch { reason });
            }
        }
    };
    if let Some(objection) = objection {
        let reason = match &objection {
            CollectiveError::Mismatch { reason } => reason.clone(),
            other => other.to_string(),
        };
        let mut told = usize::from(matches!(objection, CollectiveError::Mismatch { .. }));
        for stream in ranks.iter_mut().flatten() {
            let _ = send_verdict(stream, Some(&reason));
            told += 1;
        }
        let others = launch.world_size - 1;
        turn_away(listener, others.saturating_sub(told), &reason, |stream| {
            greet(stream, launch, own, timeouts)
        });
        return Err(objection);
    }
    let mut streams = Vec::with_capacity(ranks.len());
    for (rank, mut stream) in (1..).zip(ranks.into_iter().flatten()) {
        let sent = send_verdict(&mut stream, None);
        sent.map_err(|error| lost(rank, "joining", &error))?;
        streams.push((rank, stream));
    }
    Ok(streams)
}

/// Tells ranks that are on their way why nothing comes of it, for a while: they would ask for long.
fn turn_away(
    listener: &TcpListener,
    mut left: usize,
    reason: &str,
    greet: impl Fn(&mut TcpStream) -> Result<Hello, Stranger>,
) {
    let started = Instant::now();
    while left > 0 && started.elapsed() < PARTING {
        match listener.accept() {
            Ok((mut stream, _)) => {
                if let Ok(_) | Err(Stranger::Unfit(_)) = greet(&mut stream) {
                    let _ = send_verdict(&mut stream, Some(reason));
                    left -= 1;
                }
            }
            Err(_) => std::thread::sleep(TICK),
        }
    }
}

/// Lets one connection introduce itself, in little time: others wait behind it.
fn greet(
    stream: &mut TcpStream,
    launch: &Launch,
    own: &Hello,
    timeouts: Timeouts,
) -> Result<Hello, Stranger> {
    let short = timeouts.silence.min(Duration::from_secs(5));
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(short))?;
    stream.set_write_timeout(Some(short))?;
    receive(stream, &launch.token, own)
}

/// Connects to the root as soon as it listens, and joins.
pub(super) fn connect(
    launch: &Launch,
    own: &Hello,
    timeouts: Timeouts,
) -> Result<TcpStream, CollectiveError> {
    let started = Instant::now();
    let address = launch.address();
    let mut stream = loop {
        // Looked up each time: a name may not be known before its machine is up.
        let attempt = address.to_socket_addrs().and_then(|found| {
            let mut result = Err(io::ErrorKind::NotFound.into());
            for address in found {
                result = TcpStream::connect_timeout(&address, Duration::from_secs(5));
                if result.is_ok() {
                    break;
                }
            }
            result
        });
        match attempt {
            Ok(stream) => break stream,
            Err(source) if started.elapsed() >= timeouts.joining => {
                return Err(CollectiveError::Unreachable {
                    address,
                    seconds: timeouts.joining.as_secs(),
                    source,
                });
            }
            Err(_) => std::thread::sleep(TICK),
        }
    };
    // The verdict comes when all are there.
    let left = timeouts.joining + timeouts.silence;
    let prepared = stream.set_read_timeout(Some(left));
    prepared.map_err(|error| lost(0, "joining", &error))?;
    introduce(&mut stream, &launch.token, own)?;
    read_verdict(&mut stream)?;
    Ok(stream)
}
