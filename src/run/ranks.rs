//! What the processes of a run tell each other.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::RunError;
use crate::collective::{Collective, CollectiveError};
use crate::engine::model::Decoder;
use crate::rollout::RolloutError;

/// What became of a process's share of some work.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome<T> {
    Done(T),
    Stopped,
}

/// Returns what each process made of its share, in their order.
///
/// # Errors
///
/// Fails where any process failed or was asked to stop: on all alike.
pub(super) fn gather<T: Serialize + DeserializeOwned>(
    ranks: &dyn Collective,
    activity: &'static str,
    own: Result<T, RunError>,
) -> Result<Vec<T>, RunError> {
    if ranks.world_size() == 1 {
        return own.map(|own| vec![own]);
    }
    let outcome = match own {
        Ok(own) => Outcome::Done(own),
        Err(error) if error.is_stop() => Outcome::Stopped,
        Err(error) => return Err(error),
    };
    let bytes = serde_json::to_vec(&outcome).map_err(std::io::Error::from)?;
    let all = ranks.all_gather(activity, bytes)?;
    let outcomes = all.iter().enumerate().map(|(rank, bytes)| {
        let outcome: Outcome<T> =
            serde_json::from_slice(bytes).map_err(|_| CollectiveError::Malformed {
                rank,
                what: "episodes or counts",
            })?;
        match outcome {
            Outcome::Done(share) => Ok(share),
            Outcome::Stopped => Err(RunError::Rollout(RolloutError::Stopped)),
        }
    });
    outcomes.collect()
}

/// Holds the weights of all processes to be the same, to the bit: they are never sent, so a machine that
/// computes otherwise would go another way in silence.
///
/// # Errors
///
/// Fails where they differ, or where a process is lost.
pub(super) fn check_alike(ranks: &dyn Collective, decoder: &Decoder) -> Result<(), RunError> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let mut hasher = blake3::Hasher::new();
    for (name, var) in decoder.variables() {
        let tensor = var.to_dtype(candle_core::DType::F32);
        let numbers = tensor
            .and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
            .map_err(crate::engine::model::ModelError::from)?;
        hasher.update(name.as_bytes());
        let mut bytes = Vec::with_capacity(numbers.len() * 4);
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        hasher.update(&bytes);
    }
    let own = hasher.finalize().as_bytes().to_vec();
    let all = ranks.all_gather("comparing weights", own)?;
    match all.iter().position(|digest| *digest != all[0]) {
        Some(rank) => Err(RunError::WeightsDiffer { rank }),
        None => Ok(()),
    }
}
