//! Counts of the environment server for Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::steps::Load;
use crate::http::{Histogram, ResponseCounts, series};

/// Upper bounds of the buckets of steps, in seconds.
const BUCKETS: [f64; 12] = [
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0, 20.0, 60.0,
];

/// What the server has done.
#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) responses: ResponseCounts,
    steps: Mutex<Histogram<{ BUCKETS.len() }>>,
    opened: AtomicU64,
    refused: AtomicU64,
    cancelled: AtomicU64,
    lost: AtomicU64,
    parked: AtomicU64,
    reaped: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            responses: ResponseCounts::default(),
            steps: Mutex::new(Histogram::new(BUCKETS)),
            opened: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            reaped: AtomicU64::new(0),
        }
    }
}

impl Metrics {
    pub(super) fn observe_step(&self, duration: Duration) {
        self.steps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .observe(duration);
    }

    pub(super) fn count_opened(&self) {
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_cancelled(&self) {
        self.cancelled.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_parked(&self) {
        self.parked.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_reaped(&self, count: usize) {
        self.reaped.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Returns everything as text.
    pub(super) fn render(&self, active: usize, max: usize, load: Load) -> String {
        let mut text = String::new();
        for (name, help, value) in [
            ("openenv_sessions", "Sessions that hold a slot", active),
            ("openenv_sessions_max", "Slots", max),
            (
                "openenv_steps_waiting",
                "Steps that wait for a thread",
                load.waiting,
            ),
            (
                "openenv_steps_demoted",
                "Steps that run longer than expected",
                load.demoted,
            ),
        ] {
            series(&mut text, name, "gauge", help, value as f64);
        }
        for (name, help, value) in [
            (
                "openenv_sockets_total",
                "Sockets that got a session",
                &self.opened,
            ),
            (
                "openenv_refused_total",
                "Sessions refused for want of a slot",
                &self.refused,
            ),
            (
                "openenv_cancelled_total",
                "Steps that ended because their client went away",
                &self.cancelled,
            ),
            (
                "openenv_lost_total",
                "Answers that a session's state was lost",
                &self.lost,
            ),
            (
                "openenv_parked_total",
                "Idle interpreters that were put to rest",
                &self.parked,
            ),
            (
                "openenv_reaped_total",
                "Sessions without a socket that timed out",
                &self.reaped,
            ),
        ] {
            let value = value.load(Ordering::Relaxed) as f64;
            series(&mut text, name, "counter", help, value);
        }
        self.responses.write(&mut text);
        self.steps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write(
                &mut text,
                "openenv_step_seconds",
                "From a step's arrival to its observation",
            );
        text
    }
}
