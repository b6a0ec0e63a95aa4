//! Several episodes at a time, each on a thread that mostly waits.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError, mpsc};

use tracing::Span;

/// Plays each request with `play`, `threads` at a time and in their order, until `is_over`, which ends none
/// that is under way. What comes of them is given to `take` on this thread, in the order of their ends.
pub fn side_by_side<Q: Send, R: Send>(
    threads: usize,
    requests: VecDeque<Q>,
    is_over: impl Fn() -> bool + Sync,
    play: impl Fn(Q) -> R + Sync,
    mut take: impl FnMut(R),
) {
    let threads = threads.clamp(1, requests.len().max(1));
    let queue = Mutex::new(requests);
    let next = || {
        queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    };
    let (sender, receiver) = mpsc::channel();
    // What is logged says of which run it is.
    let span = Span::current();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (sender, next, is_over, play) = (sender.clone(), &next, &is_over, &play);
            let span = &span;
            scope.spawn(move || {
                let _within = span.enter();
                while !is_over() {
                    let Some(request) = next() else { break };
                    if sender.send(play(request)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        receiver.into_iter().for_each(&mut take);
    });
}
