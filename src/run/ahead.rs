//! The episodes of the next step, sampled while the gradient of this one is computed.
//!
//! Both only read the weights, which move once both are done. So there is one copy of them, nothing
//! depends on which is faster, and the episodes are exactly one step old when they are learned from.

use std::io::{BufReader, BufWriter, Write as _};
use std::path::Path;

use fs_err as fs;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};
use tracing::Span;

use super::RunError;
use super::draw::{DrawState, Place, Share, StepEpisodes, TaskDraws};
use crate::collective::{Collective, Solo};
use crate::engine::Engine;
use crate::rollout::PausedRecord;

/// The file of a checkpoint that holds episodes.
const FILE: &str = "episodes.json";

/// The episodes of a step to come.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ahead {
    pub(super) episodes: StepEpisodes,
    /// How far tasks were drawn before them, for a run that is to sample the step again.
    pub(super) before: DrawState,
}

/// Episodes as a checkpoint has them.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Saved<A, P> {
    ahead: A,
    paused: P,
}

/// Writes the episodes that a run has between two steps into the folder of a checkpoint: those of the next
/// step and the groups that wait.
pub(super) fn save_episodes(
    checkpoint: &Path,
    ahead: Option<&Ahead>,
    paused: &[PausedRecord],
) -> Result<(), RunError> {
    if ahead.is_none() && paused.is_empty() {
        return Ok(());
    }
    let mut file = BufWriter::new(fs::File::create(checkpoint.join(FILE))?);
    serde_json::to_writer(&mut file, &Saved { ahead, paused }).map_err(std::io::Error::from)?;
    Ok(file.flush()?)
}

/// Reads what [`save_episodes`] wrote, if it did.
pub(super) fn load_episodes(
    checkpoint: &Path,
) -> Result<(Option<Ahead>, Vec<PausedRecord>), RunError> {
    let path = checkpoint.join(FILE);
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((None, Vec::new()));
        }
        Err(error) => return Err(error.into()),
    };
    let saved: Saved<_, _> = serde_json::from_reader(BufReader::new(file))
        .map_err(|source| RunError::Progress { path, source })?;
    Ok((saved.ahead, saved.paused))
}

/// What was sampled while a gradient was computed.
#[derive(Debug)]
pub(super) enum Sampled {
    /// All of a step, by the only process.
    Step(Box<Result<StepEpisodes, RunError>>),
    /// This process's share of the first draw; what the others have is asked for behind the gradient,
    /// since processes do one thing at a time together.
    Share(Share),
}

/// Threads that the model computes on while it samples and another pass trains: each of the two has as
/// many, and the machine divides its cores between them. In one pool a pass would wait behind the other's.
#[derive(Debug)]
pub(super) struct Sampler(ThreadPool);

impl Sampler {
    pub(super) fn new() -> Result<Self, RunError> {
        let name = |index| format!("sampling-{index}");
        let pool = ThreadPoolBuilder::new()
            .num_threads(rayon::current_num_threads())
            .thread_name(name)
            .build();
        Ok(Self(pool.map_err(std::io::Error::other)?))
    }

    /// Computes `gradient`, and samples what `place` names meanwhile. Returns when both are done.
    pub(super) fn overlap<G>(
        &self,
        draws: &mut TaskDraws<'_>,
        engine: &mut Engine,
        place: Place,
        ranks: &dyn Collective,
        gradient: impl FnOnce() -> G,
    ) -> (G, Sampled) {
        let (is_alone, share) = (ranks.world_size() == 1, draws.share(ranks));
        let span = Span::current();
        std::thread::scope(|scope| {
            let sampling = scope.spawn(|| {
                self.0.install(|| {
                    let _within = span.enter();
                    if is_alone {
                        Sampled::Step(Box::new(draws.step(engine, place, &Solo)))
                    } else {
                        Sampled::Share(draws.sample_first(engine, place, share))
                    }
                })
            });
            let gradient = gradient();
            let sampled = sampling.join();
            let sampled = sampled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (gradient, sampled)
        })
    }
}

impl Sampled {
    /// Returns the whole step's episodes: with the same weights still, the other processes' and further
    /// draws.
    pub(super) fn complete(
        self,
        draws: &mut TaskDraws<'_>,
        engine: &mut Engine,
        place: Place,
        ranks: &dyn Collective,
    ) -> Result<StepEpisodes, RunError> {
        match self {
            Self::Step(episodes) => *episodes,
            Self::Share(first) => draws.complete(engine, place, ranks, first),
        }
    }
}
