//! `meter.refill`: how a guest's meter asks the host whether it may go on.
//!
//! The meter holds all that is left of a call's budget, so when a call runs out of it does not
//! depend on when the host is asked.

use std::time::{Duration, Instant};

use wasmtime::{AsContextMut, Caller, Extern, Global, Linker, Result, Store, Val};

use super::cancel::Cancel;
use super::error::SandboxError;
use super::host::Host;
use super::meter::{MARK, METER, REFILL};

/// Units between two looks at the deadline: one to three milliseconds.
const SLICE: i64 = 20_000_000;

/// When a call has to end, other than by using up its meter.
#[derive(Debug)]
pub(super) struct Budget {
    /// `None` until the first call, and beyond what the clock can hold.
    deadline: Option<Instant>,
    slice: i64,
    cancel: Option<Cancel>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            deadline: None,
            slice: SLICE,
            cancel: None,
        }
    }
}

impl Budget {
    /// Starts the time of a call.
    pub(super) fn start(&mut self, deadline: Duration) {
        self.deadline = Instant::now().checked_add(deadline);
    }

    /// Lets `cancel` end the calls that follow.
    pub(super) fn heed(&mut self, cancel: &Cancel) {
        self.cancel = Some(cancel.clone());
    }

    /// Returns why the call has to end, if it has to.
    pub(super) fn stop(&self) -> Option<Stop> {
        if self.cancel.as_ref().is_some_and(Cancel::is_cancelled) {
            Some(Stop::Cancelled)
        } else {
            let is_over = |deadline| Instant::now() >= deadline;
            self.deadline.is_some_and(is_over).then_some(Stop::Deadline)
        }
    }
}

/// Why the host ended a call. It unwinds the guest as an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Stop {
    #[error("the meter is used up")]
    OutOfFuel,
    #[error("the deadline has passed")]
    Deadline,
    #[error("the call is cancelled")]
    Cancelled,
}

/// The meter of one instance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gauge {
    meter: Global,
    mark: Global,
}

impl Gauge {
    /// Finds the meter; `None` if the module was not metered.
    pub(super) fn find(
        instance: &wasmtime::Instance,
        mut store: impl AsContextMut,
    ) -> Option<Self> {
        Some(Self {
            meter: instance.get_global(&mut store, METER)?,
            mark: instance.get_global(&mut store, MARK)?,
        })
    }

    /// Sets the meter to `fuel`.
    ///
    /// # Errors
    ///
    /// Returns an error if the module's globals are not the meter's.
    pub(super) fn start(self, store: &mut Store<Host>, fuel: u64) -> Result<(), SandboxError> {
        let slice = store.data().budget.slice;
        let fuel = i64::try_from(fuel).unwrap_or(i64::MAX);
        self.meter
            .set(&mut *store, Val::I64(fuel))
            .and_then(|()| self.mark.set(store, Val::I64(next_mark(fuel, slice))))
            .map_err(SandboxError::engine("setting the meter"))
    }

    /// Returns what is left; below zero when it was used up.
    pub(super) fn left(self, store: impl AsContextMut) -> i64 {
        self.meter.get(store).i64().unwrap_or(-1)
    }
}

/// Where to be asked next. Never below zero: asking is a charge's only check.
fn next_mark(left: i64, slice: i64) -> i64 {
    left.saturating_sub(slice).max(0)
}

/// Defines the meter's question in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(REFILL.0, REFILL.1, refill)?;
    Ok(())
}

/// Ends the call or moves the mark. Without a meter there is nothing to do: a guest that marks its
/// loops calls this while it is started.
fn refill(mut caller: Caller<'_, Host>) -> Result<()> {
    let Some((meter, mark)) = Option::zip(
        caller.get_export(METER).and_then(Extern::into_global),
        caller.get_export(MARK).and_then(Extern::into_global),
    ) else {
        return Ok(());
    };
    let left = Gauge { meter, mark }.left(&mut caller);
    if left < 0 {
        return Err(Stop::OutOfFuel.into());
    }
    let budget = &caller.data().budget;
    if let Some(stop) = budget.stop() {
        return Err(stop.into());
    }
    let next = next_mark(left, budget.slice);
    mark.set(caller, Val::I64(next))
}
