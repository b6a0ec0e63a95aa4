//! Several ranks in one test, each in a thread.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use super::{CollectiveError, Launch, TcpCollective, Timeouts, Token};

pub(crate) const QUICK: Timeouts = Timeouts {
    joining: Duration::from_secs(20),
    silence: Duration::from_millis(2000),
    patience: Duration::from_secs(60),
};

/// Returns the launches of `world_size` ranks at a port that nobody listens at.
pub(crate) fn launches(world_size: usize) -> Vec<Launch> {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let launch = |rank| Launch {
        rank,
        world_size,
        local_rank: rank,
        host: "127.0.0.1".to_owned(),
        port,
        token: Token::from("secret"),
    };
    (0..world_size).map(launch).collect()
}

pub(crate) fn join(
    launch: &Launch,
    identity: &str,
    timeouts: Timeouts,
) -> Result<TcpCollective, CollectiveError> {
    TcpCollective::join(launch, identity, timeouts, Arc::default())
}

/// Runs `work` on each rank, in a thread of its own, and returns what each makes of it.
pub(crate) fn on_ranks<T: Send>(
    launches: &[Launch],
    timeouts: Timeouts,
    work: impl Fn(TcpCollective) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = launches
            .iter()
            .map(|launch| scope.spawn(|| work(join(launch, "steps = 1", timeouts).unwrap())))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}
