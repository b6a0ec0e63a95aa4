//! `meter.refill`: how a guest's meter asks the host whether it may go on.
//!
//! The meter holds what is left of a call's fuel, up to more than any loop of the guest takes that
//! does not ask; the rest is in reserve and is handed out whenever the host is asked. Where that is
//! depends on the fuel used alone, so a call runs out at the same point on every machine. A loop
//! that takes more without asking is one that a wrecked interpreter cannot leave: it has used up
//! its fuel, early, rather than outrun the deadline.

use std::time::{Duration, Instant};

use wasmtime::{AsContextMut, Caller, Extern, Global, Linker, Result, Store, Val};

use super::cancel::Cancel;
use super::error::SandboxError;
use super::host::Host;
use super::meter::{MARK, METER, REFILL};

/// Units between two looks at the deadline: one to three milliseconds.
const SLICE: i64 = 20_000_000;

/// The least that the meter is given, if there is as much: a fifth of a second.
const MIN_GIVEN: i64 = 1_000_000_000;
/// What is given for each byte that the guest's memory may have. A loop that does not ask goes over
/// memory, once, and an iteration takes a few units.
const GIVEN_PER_BYTE: i64 = 16;

/// When a call has to end, and the fuel that its meter does not hold.
#[derive(Debug)]
pub(super) struct Budget {
    reserve: i64,
    /// The most that the meter holds.
    given: i64,
    /// `None` until the first call, and beyond what the clock can hold.
    deadline: Option<Instant>,
    /// Since when the clock has stopped, if it has.
    waiting_since: Option<Instant>,
    /// How long it had stopped before, in this call.
    waited: Duration,
    pub(super) slice: i64,
    cancel: Option<Cancel>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            reserve: 0,
            given: MIN_GIVEN,
            deadline: None,
            waiting_since: None,
            waited: Duration::ZERO,
            slice: SLICE,
            cancel: None,
        }
    }
}

impl Budget {
    /// Starts the time of a call.
    pub(super) fn start(&mut self, deadline: Duration) {
        self.deadline = Instant::now().checked_add(deadline);
        self.waiting_since = None;
        self.waited = Duration::ZERO;
    }

    /// Stops the clock: the guest waits for the one on the other side of the bridge, whose time it
    /// is now.
    pub(super) fn pause(&mut self) {
        self.waiting_since.get_or_insert_with(Instant::now);
    }

    /// Lets the clock go on.
    pub(super) fn resume(&mut self) {
        if let Some(since) = self.waiting_since.take() {
            let waited = since.elapsed();
            self.waited += waited;
            self.deadline = self.deadline.and_then(|end| end.checked_add(waited));
        }
    }

    /// Returns how long the clock has stopped in this call.
    pub(super) fn waited(&self) -> Duration {
        let now = self.waiting_since.map(|since| since.elapsed());
        self.waited + now.unwrap_or_default()
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

    /// Starts a call with `fuel`.
    ///
    /// # Errors
    ///
    /// Returns an error if the module's globals are not the meter's.
    pub(super) fn start(self, store: &mut Store<Host>, fuel: u64) -> Result<(), SandboxError> {
        let host = store.data_mut();
        let memory = i64::try_from(host.memory.limit()).unwrap_or(i64::MAX);
        host.budget.given = memory.saturating_mul(GIVEN_PER_BYTE).max(MIN_GIVEN);
        let fuel = i64::try_from(fuel).unwrap_or(i64::MAX);
        self.give(store, fuel)
            .map_err(SandboxError::engine("setting the meter"))
    }

    /// Divides `fuel` between meter and reserve.
    fn give(self, mut store: impl AsContextMut<Data = Host>, fuel: i64) -> Result<()> {
        let mut store = store.as_context_mut();
        let budget = &mut store.data_mut().budget;
        let given = fuel.min(budget.given);
        budget.reserve = fuel - given;
        // Never below zero: asking is a charge's only check.
        let mark = given.saturating_sub(budget.slice).max(0);
        self.meter.set(&mut store, Val::I64(given))?;
        self.mark.set(&mut store, Val::I64(mark))
    }

    /// Returns what is left; below zero when it was used up.
    pub(super) fn left(self, mut store: impl AsContextMut<Data = Host>) -> i64 {
        let mut store = store.as_context_mut();
        match self.meter.get(&mut store).i64() {
            Some(left @ 0..) => left.saturating_add(store.data().budget.reserve),
            _ => -1,
        }
    }
}

/// Takes `fuel` from the guest for work of the host's that it asked for, and looks at its clock: such
/// work passes no mark of the meter's.
///
/// # Errors
///
/// Returns why the guest has to end, if it has to.
pub(super) fn charge(
    mut store: impl AsContextMut<Data = Host>,
    gauge: Option<Gauge>,
    fuel: u64,
) -> Result<()> {
    let mut store = store.as_context_mut();
    if let Some(gauge) = gauge {
        let fuel = i64::try_from(fuel).unwrap_or(i64::MAX);
        let left = gauge.left(&mut store).saturating_sub(fuel);
        gauge.give(&mut store, left.max(0))?;
        if left < 0 {
            return Err(Stop::OutOfFuel.into());
        }
    } else {
        let left = store.get_fuel()?.checked_sub(fuel);
        store.set_fuel(left.unwrap_or(0))?;
        if left.is_none() {
            return Err(Stop::OutOfFuel.into());
        }
    }
    match store.data().budget.stop() {
        Some(stop) => Err(stop.into()),
        None => Ok(()),
    }
}

/// Gives the guest that is running `fuel` anew, and returns what it used of as much before.
///
/// # Errors
///
/// Returns an error if the guest has no meter.
pub(super) fn refuel(caller: &mut Caller<'_, Host>, fuel: u64) -> Result<u64> {
    let used = |left: u64| fuel.saturating_sub(left);
    if let Some(gauge) = gauge_of(caller) {
        let left = gauge.left(&mut *caller).try_into().unwrap_or(0);
        gauge.give(caller, i64::try_from(fuel).unwrap_or(i64::MAX))?;
        return Ok(used(left));
    }
    let mut store = caller.as_context_mut();
    let left = store.get_fuel()?;
    store.set_fuel(fuel)?;
    Ok(used(left))
}

/// Finds the meter of the guest that is running, unless wasmtime counts.
pub(super) fn gauge_of(caller: &mut Caller<'_, Host>) -> Option<Gauge> {
    Some(Gauge {
        meter: caller.get_export(METER).and_then(Extern::into_global)?,
        mark: caller.get_export(MARK).and_then(Extern::into_global)?,
    })
}

/// Defines the meter's question in `linker`.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> Result<()> {
    linker.func_wrap(REFILL.0, REFILL.1, refill)?;
    Ok(())
}

/// Ends the call or moves the mark. Without a meter there is nothing to do: a guest that marks its
/// loops calls this while it is started.
fn refill(mut caller: Caller<'_, Host>) -> Result<()> {
    let Some(gauge) = gauge_of(&mut caller) else {
        return Ok(());
    };
    let left = gauge.left(&mut caller);
    if left < 0 {
        return Err(Stop::OutOfFuel.into());
    }
    if let Some(stop) = caller.data().budget.stop() {
        return Err(stop.into());
    }
    gauge.give(caller, left)
}
