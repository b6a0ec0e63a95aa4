//! Slow work that nobody waits for until the end.

use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// Does jobs one after another on a thread of its own; dropped, it waits until all are done.
#[derive(Debug)]
pub(super) struct Janitor {
    /// Taken when it ends.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Janitor {
    pub(super) fn start() -> std::io::Result<Self> {
        let (sender, jobs) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new()
            .name("actor-janitor".to_owned())
            .spawn(move || jobs.into_iter().for_each(|job| job()))?;
        Ok(Self {
            jobs: Some(sender),
            thread: Some(thread),
        })
    }

    pub(super) fn push(&self, job: impl FnOnce() + Send + 'static) {
        let jobs = self
            .jobs
            .as_ref()
            .expect("it is taken when this is dropped");
        // Nobody takes it only where the thread has panicked, and then the run's folder is deleted anyway.
        let _ = jobs.send(Box::new(job));
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
