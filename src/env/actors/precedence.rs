//! What is judged comes before what policies do, where the CPUs are short.

use crate::actor::Actor;

/// Lets an actor come before others for as long as this lives: while it is judged in, or begun, which must not be late
/// by what policies do elsewhere.
#[derive(Debug)]
pub(super) struct Precedence<'a>(&'a dyn Actor);

impl<'a> Precedence<'a> {
    pub(super) fn of(actor: &'a dyn Actor) -> Self {
        actor.come_first(true);
        Self(actor)
    }
}

impl Drop for Precedence<'_> {
    fn drop(&mut self) {
        self.0.come_first(false);
    }
}
