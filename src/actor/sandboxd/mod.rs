//! A server that runs inside an actor or a pod of somebody else's, and the [`Actor`](super::Actor) that is
//! reached through it.
//!
//! [`Server`] is `wardian sandboxd`: commands, trees and health over HTTP/1.1, for those that know its token.
//! [`SandboxdActor`] is its client. Where a platform starts machines but has no call that runs a program in
//! them, this is that call. [`Machine`] is the same for another protocol that the process serves beside it.
//!
//! **Turns.** Who may use a server *claims* it, and each command or tree that goes in has the next number
//! under that claim. A number is taken once. So a request can be sent again whenever its answer was lost: it
//! is run at most once, and its answer is kept until the next. A server that was started anew, or was put
//! back to an earlier state, knows the claim or the number no more, and says so instead of going on without
//! what was there.
//!
//! **What it guards.** Its token keeps the network out; it is no wall against the programs that it runs. Where
//! they are root, as it is, they can read the token, and under gVisor end the server even as process 1. An
//! actor whose server is gone is a fault of ours, as it cannot be told from here who ended it (a backend that knows
//! that the machine lives may tell): to keep a policy from that way out, run its commands as another user. The wall is
//! the actor's.

mod client;
mod files;
mod link;
mod machine;
mod processes;
mod server;
mod token;
mod wire;

pub use client::{SandboxdActor, SandboxdOptions};
pub use machine::{Hold, Machine, MachineConfig};
pub use server::{Server, ServerLimits};
pub use token::{BearerToken, TokenError};

/// Who the messages say is at fault.
const NAME: &str = "sandboxd";
