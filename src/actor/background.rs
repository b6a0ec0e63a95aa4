//! Asynchronous work for callers that wait for it, whatever thread they are on.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::actor::ActorError;

/// How much longer than its limit a piece of work is waited for: it should end by itself.
const SLACK: Duration = Duration::from_secs(5);

/// The threads that wait for the network.
#[derive(Debug)]
pub(crate) struct Background {
    /// Taken when it ends.
    runtime: Option<Runtime>,
    closing: watch::Sender<bool>,
}

impl Background {
    /// Starts them.
    ///
    /// # Errors
    ///
    /// Fails where the system has no thread left.
    pub(crate) fn start() -> Result<Self, ActorError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("actor-network")
            .enable_all()
            .build()
            .map_err(|source| ActorError::Files {
                activity: "starting threads for the network",
                source,
            })?;
        Ok(Self {
            runtime: Some(runtime),
            closing: watch::Sender::new(false),
        })
    }

    /// As [`Self::run`], and drops the work once [`Self::close`] is called.
    ///
    /// # Errors
    ///
    /// As for [`Self::run`], and where it was dropped.
    pub(crate) fn run_while_open<T: Send + 'static>(
        &self,
        activity: &str,
        limit: Duration,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, ActorError> {
        let mut closing = self.closing.subscribe();
        let done = self.run(activity, limit, async move {
            tokio::select! {
                done = work => Some(done),
                _ = closing.wait_for(|is_closing| *is_closing) => None,
            }
        })?;
        done.ok_or_else(|| ActorError::Backend {
            activity: activity.to_owned(),
            message: "the run ends".to_owned(),
        })
    }

    /// Ends what waits for programs in actors, now and from now on.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Waits for `work`, which should bound itself by `limit`.
    ///
    /// # Errors
    ///
    /// Fails where it takes longer; then it is dropped.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        activity: &str,
        limit: Duration,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, ActorError> {
        let (sender, result) = mpsc::sync_channel(1);
        let task = self.spawn(async move {
            // Who asked may have given up.
            let _ = sender.send(work.await);
        });
        let result = result.recv_timeout(limit.saturating_add(SLACK));
        task.abort();
        result.map_err(|error| match error {
            RecvTimeoutError::Timeout => ActorError::Hung {
                activity: activity.to_owned(),
                limit,
            },
            RecvTimeoutError::Disconnected => ActorError::Backend {
                activity: activity.to_owned(),
                message: "it panicked".to_owned(),
            },
        })
    }

    /// Does work until the handle is aborted, or this is dropped.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime().spawn(work)
    }

    fn runtime(&self) -> &Runtime {
        (self.runtime.as_ref()).expect("it is taken when this is dropped")
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Nobody waits for what is left, and it may be one of its own threads that drops this.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn closing_ends_what_waits_for_a_program_and_nothing_else() {
        let background = Arc::new(Background::start().unwrap());
        let waiting = Arc::clone(&background);
        let waiting = std::thread::spawn(move || {
            let hour = Duration::from_secs(3600);
            waiting.run_while_open("waiting", hour, std::future::pending::<()>())
        });
        background.close();
        let error = waiting.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "waiting failed: the run ends");
        let done = background.run("deleting", Duration::from_secs(60), std::future::ready(3));
        assert_eq!(done.unwrap(), 3);
    }
}
