//! The threads that tools and graders run on.
//!
//! They are not those that the model computes on: a program runs for seconds, and a pass over the model
//! that waits for a thread would wait for it.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// As many as the machine has cores: guests compute, so that more would only share them.
static TOOLS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let name = |index| format!("tools-{index}");
    let pool = ThreadPoolBuilder::new().thread_name(name).build();
    pool.inspect_err(|error| tracing::warn!(%error, "tools run on the model's threads"))
        .ok()
});

/// Lets what another thread logs say of which run it is.
fn within_span(run: impl FnOnce() + Send + 'static) -> impl FnOnce() + Send + 'static {
    let span = tracing::Span::current();
    move || span.in_scope(run)
}

/// Runs what mostly waits for work elsewhere, on a thread of its own: it would keep others from computing.
pub(super) fn spawn_waiting(run: impl FnOnce() + Send + 'static) {
    let run = within_span(run);
    let run = Arc::new(Mutex::new(Some(run)));
    let of_thread = Arc::clone(&run);
    let take = |run: &Mutex<Option<_>>| run.lock().unwrap_or_else(PoisonError::into_inner).take();
    let thread = std::thread::Builder::new().name("waiting".to_owned());
    let spawned = thread.spawn(move || {
        if let Some(run) = take(&of_thread) {
            run();
        }
    });
    // With no more threads to be had, those that there are must do.
    if let Err(error) = spawned {
        tracing::warn!(%error, "a step elsewhere waits on the threads of tools");
        if let Some(run) = take(&run) {
            spawn_tools(run);
        }
    }
}

/// Runs something of an episode beside the sampling, the oldest first.
pub(super) fn spawn_tools(run: impl FnOnce() + Send + 'static) {
    let run = within_span(run);
    match &*TOOLS {
        Some(pool) => pool.spawn_fifo(run),
        None => rayon::spawn(run),
    }
}
