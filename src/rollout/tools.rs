//! The threads that tools and graders run on.
//!
//! They are not those that the model computes on: a program runs for seconds, and a pass over the model
//! that waits for a thread would wait for it.

use std::sync::LazyLock;

use rayon::{ThreadPool, ThreadPoolBuilder};

/// As many as the machine has cores: guests compute, so that more would only share them.
static TOOLS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let name = |index| format!("tools-{index}");
    let pool = ThreadPoolBuilder::new().thread_name(name).build();
    pool.inspect_err(|error| tracing::warn!(%error, "tools run on the model's threads"))
        .ok()
});

/// Runs something of an episode beside the sampling, the oldest first.
pub(super) fn spawn_tools(run: impl FnOnce() + Send + 'static) {
    match &*TOOLS {
        Some(pool) => pool.spawn_fifo(run),
        None => rayon::spawn(run),
    }
}
