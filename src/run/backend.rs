//! Which backend runs a run's actors, and opening it.

use std::sync::Arc;

use crate::actor::bwrap::BwrapBackend;
use crate::actor::escalation::{Candidate, Decision, Needs, Rules, Tier, decide};
use crate::actor::runsc::{RunscBackend, RunscOptions};
use crate::actor::{ActorBackend, ActorError, Isolation};
use crate::causes::with_causes;
use crate::config::{ActorBackendName, ActorConfig};

/// Opens the backend that `config` names; `auto` takes the strongest that is there, and none weaker than gVisor.
/// Also returns why it was chosen.
///
/// # Errors
///
/// Fails where it is not there, and where none that is there does.
pub fn open_backend(
    config: &ActorConfig,
    needs: &Needs,
) -> Result<(Arc<dyn ActorBackend>, String), ActorError> {
    let names: &[ActorBackendName] = match &config.backend {
        ActorBackendName::Auto => &[ActorBackendName::Runsc, ActorBackendName::Bwrap],
        name => std::slice::from_ref(name),
    };
    let mut rules = Rules::default();
    if config.backend != ActorBackendName::Auto {
        // Named, whatever it is: that is how weaker isolation is asked for.
        rules.weakest = Isolation::Namespaces;
    }
    let opened: Vec<_> = (names.iter())
        .map(|name| (name.as_str(), open(*name)))
        .collect();
    let candidates: Vec<Candidate> = (opened.iter())
        .map(|(name, backend)| Candidate {
            name,
            state: match backend {
                Ok(backend) => Ok(backend.capabilities()),
                Err(error) => Err(with_causes(error)),
            },
        })
        .collect();
    let Decision { tier, why } = decide(needs, &candidates, &rules)?;
    let chosen = opened.into_iter().find_map(|(name, backend)| {
        let backend = backend.ok()?;
        (tier == Tier::Actor(name)).then_some(backend)
    });
    // What needs a shell is never sent to WebAssembly.
    let backend = chosen.ok_or_else(|| ActorError::InvalidSpec {
        reason: format!("{tier:?} was chosen for what needs a shell"),
    })?;
    Ok((backend, why))
}

/// Opens a backend. One more is opened here, and named in the configuration.
fn open(name: ActorBackendName) -> Result<Arc<dyn ActorBackend>, ActorError> {
    Ok(match name {
        ActorBackendName::Auto | ActorBackendName::Runsc => {
            Arc::new(RunscBackend::open(&RunscOptions::default())?)
        }
        ActorBackendName::Bwrap => Arc::new(BwrapBackend::open(None)?),
    })
}

/// Whether the actors of a backend can start from an image of a registry.
pub(super) fn has_images(name: ActorBackendName) -> bool {
    match name {
        ActorBackendName::Auto | ActorBackendName::Runsc | ActorBackendName::Bwrap => false,
    }
}
