//! Saved episodes on their way back: their environments are answered their turns again.
//!
//! All begin before the first is waited for, and each is answered beside the others, where its
//! environment's steps belong (`tools`). So servers that are slow, or not there, are waited for together,
//! and a request to stop is noticed meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::RolloutError;
use super::agent::Episode;
use super::collector::{RESET_POLL, STOP_LATENCY};
use super::paused::{OpenTurn, PausedEpisode, PausedGroup, PausedRecord};
use super::tools::{spawn_tools, spawn_waiting};
use crate::chat::ToolCallFormat;
use crate::engine::Tokenizer;
use crate::env::Environment;
use crate::trajectory::Trajectory;

/// An episode whose environment is not where it was yet.
struct Returning {
    group: usize,
    environment: Box<dyn Environment>,
    trajectory: Trajectory,
    turn: OpenTurn,
}

/// An episode that is back, or has failed.
type Back = (usize, Episode, OpenTurn);

impl PausedGroup {
    /// Returns saved groups, each given a fresh environment for each of its samples, which is answered the
    /// episode's turns again. An episode whose environment fails, or says something else by now, has failed,
    /// by our fault.
    ///
    /// # Errors
    ///
    /// Fails with [`RolloutError::Stopped`] once `stop` is true.
    pub fn restore(
        saved: Vec<(PausedRecord, Vec<Box<dyn Environment>>)>,
        tokenizer: &Tokenizer,
        format: ToolCallFormat,
        stop: &AtomicBool,
    ) -> Result<Vec<Self>, RolloutError> {
        let mut groups = Vec::with_capacity(saved.len());
        let mut returning = Vec::new();
        for (record, environments) in saved {
            let PausedRecord {
                task_id,
                origin,
                max_new_tokens,
                done,
                paused,
            } = record;
            let mut environments: Vec<_> = environments.into_iter().map(Some).collect();
            for (trajectory, turn) in paused {
                let sample = usize::try_from(trajectory.sample).unwrap_or(usize::MAX);
                if let Some(environment) = environments.get_mut(sample).and_then(Option::take) {
                    returning.push(Returning {
                        group: groups.len(),
                        environment,
                        trajectory,
                        turn,
                    });
                }
            }
            groups.push(Self {
                task_id,
                origin,
                max_new_tokens,
                done,
                paused: Vec::new(),
            });
        }
        for (group, episode, turn) in bring_back(returning, tokenizer, format, stop)? {
            let group = &mut groups[group];
            match episode.has_failed() {
                true => group.done.push(episode.into_trajectory()),
                false => group.paused.push(PausedEpisode { episode, turn }),
            }
        }
        // They came in the order of their ends.
        for group in &mut groups {
            let sample = |paused: &PausedEpisode| paused.episode.trajectory().sample;
            group.paused.sort_by_key(sample);
        }
        Ok(groups)
    }
}

/// Answers the turns of all episodes again, side by side.
fn bring_back(
    mut returning: Vec<Returning>,
    tokenizer: &Tokenizer,
    format: ToolCallFormat,
    stop: &AtomicBool,
) -> Result<Vec<Back>, RolloutError> {
    let count = returning.len();
    for episode in &mut returning {
        episode.environment.prepare();
    }
    let (sender, receiver) = mpsc::channel();
    let mut back = Vec::with_capacity(count);
    while back.len() < count {
        if stop.load(Ordering::Relaxed) {
            return Err(RolloutError::Stopped);
        }
        let prepared = returning.extract_if(.., |episode| episode.environment.is_prepared());
        for episode in prepared {
            replay_beside(episode, tokenizer.clone(), format, sender.clone());
        }
        let patience = match returning.is_empty() {
            true => STOP_LATENCY,
            false => RESET_POLL,
        };
        back.extend(receiver.recv_timeout(patience));
        back.extend(receiver.try_iter());
    }
    Ok(back)
}

/// Answers the turns of an episode again on a thread of its kind, which sends it back.
fn replay_beside(
    episode: Returning,
    tokenizer: Tokenizer,
    format: ToolCallFormat,
    sender: mpsc::Sender<Back>,
) {
    let Returning {
        group,
        environment,
        trajectory,
        turn,
    } = episode;
    let waits = environment.waits();
    let run = move || {
        let decode = |ids: &[u32]| tokenizer.decode(ids);
        let episode = Episode::replay(environment, trajectory, &decode, format);
        // The receiver is gone only when it is to stop; then nobody waits.
        let _ = sender.send((group, episode, turn));
    };
    if waits {
        spawn_waiting(run);
    } else {
        spawn_tools(run);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Condvar, Mutex, PoisonError};
    use std::time::Duration;

    use indexmap::IndexMap;

    use super::*;
    use crate::chat::{Message, ParsedTurn, ToolSpec};
    use crate::env::{EnvError, EpisodeStats, StepResult};
    use crate::rollout::Origin;
    use crate::trajectory::{Finish, Status, TokenTrace, Turn, Usage};

    /// Far longer than anything here takes, so that a test that fails ends.
    const AT_MOST: Duration = Duration::from_secs(30);

    /// What the environments of a test have in common.
    struct Party {
        size: usize,
        prepared: Mutex<usize>,
        in_step: Mutex<usize>,
        all_in_step: Condvar,
        /// How often one was asked whether it is prepared.
        asked: Mutex<usize>,
        stop: AtomicBool,
        /// None is ever prepared, and the run is to stop once one was asked.
        is_silent: bool,
    }

    impl Party {
        fn new(size: usize, is_silent: bool) -> Arc<Self> {
            Arc::new(Self {
                size,
                prepared: Mutex::new(0),
                in_step: Mutex::new(0),
                all_in_step: Condvar::new(),
                asked: Mutex::new(0),
                stop: AtomicBool::new(false),
                is_silent,
            })
        }
    }

    /// An environment elsewhere, which takes part with the others at the same time or not at all.
    struct Guest {
        party: Arc<Party>,
        fails: bool,
    }

    impl Environment for Guest {
        fn prepare(&mut self) {
            *self.party.prepared.lock().unwrap() += 1;
        }

        fn is_prepared(&mut self) -> bool {
            *self.party.asked.lock().unwrap() += 1;
            if self.party.is_silent {
                self.party.stop.store(true, Ordering::Relaxed);
            }
            !self.party.is_silent
        }

        fn reset(&mut self) -> Result<Vec<Message>, EnvError> {
            let prepared = *self.party.prepared.lock().unwrap();
            if prepared < self.party.size {
                let source = format!("{prepared} are prepared").into();
                return Err(EnvError::Remote { source });
            }
            Ok(vec![Message::user("Begin.")])
        }

        fn waits(&self) -> bool {
            true
        }

        fn tools(&self) -> &[ToolSpec] {
            &[]
        }

        fn step(&mut self, turn: &ParsedTurn) -> Result<StepResult, EnvError> {
            if self.fails {
                let source = "it has closed the connection".into();
                return Err(EnvError::Remote { source });
            }
            let party = &*self.party;
            let mut in_step = party.in_step.lock().unwrap();
            *in_step += 1;
            party.all_in_step.notify_all();
            let wait = (party.all_in_step)
                .wait_timeout_while(in_step, AT_MOST, |in_step| *in_step < party.size);
            if wait.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
                let source = "the others do not come".into();
                return Err(EnvError::Remote { source });
            }
            Ok(StepResult::goes_on(vec![Message::user(
                turn.content.clone(),
            )]))
        }

        fn close(&mut self, _cut_off: Option<&ParsedTurn>) -> StepResult {
            unreachable!("no episode of these tests ends")
        }

        fn stats(&self) -> EpisodeStats {
            EpisodeStats::default()
        }
    }

    /// An episode that has said `hi` and was told so.
    fn episode(sample: u32) -> (Trajectory, OpenTurn) {
        let ids: Vec<u32> = "hi\n".bytes().map(u32::from).collect();
        let mut trace = TokenTrace::new();
        trace.push_prompt(&[1]).unwrap();
        trace.push_sampled(&ids, &[-0.5; 3]).unwrap();
        let trajectory = Trajectory {
            task_id: "task".to_owned(),
            group: 0,
            sample,
            policy_step: 1,
            segments: Vec::new(),
            messages: vec![
                Message::user("Begin."),
                Message::assistant("hi"),
                Message::user("hi"),
            ],
            turns: vec![Turn {
                message: 1,
                tokens: 1..4,
                finish: Finish::Stop,
                tool_calls: 0,
                tool_failures: 0,
                runs: Vec::new(),
            }],
            trace,
            reward: None,
            rewards: IndexMap::new(),
            passed: None,
            status: Status::Finished,
            usage: Usage::default(),
        };
        (trajectory, OpenTurn::default())
    }

    /// Brings back groups with so many episodes each, of which the one with the sample `failing` loses its
    /// environment.
    fn restore(
        party: &Arc<Party>,
        sizes: &[u32],
        failing: Option<u32>,
    ) -> Result<Vec<PausedGroup>, RolloutError> {
        let guest = |fails| {
            Box::new(Guest {
                party: Arc::clone(party),
                fails,
            }) as Box<dyn Environment>
        };
        let group = |(place, size): (usize, &u32)| {
            let record = PausedRecord {
                task_id: format!("task {place}"),
                origin: Origin {
                    step: 1,
                    draw: 0,
                    visit: 0,
                },
                max_new_tokens: 8,
                done: Vec::new(),
                paused: (0..*size).map(episode).collect(),
            };
            let environments = (0..*size).map(|sample| guest(failing == Some(sample)));
            (record, environments.collect())
        };
        let saved = sizes.iter().enumerate().map(group).collect();
        let tokenizer = Tokenizer::byte_level(&["<|end|>"]).unwrap();
        PausedGroup::restore(saved, &tokenizer, ToolCallFormat::Hermes, &party.stop)
    }

    #[test]
    fn episodes_of_servers_come_back_together() {
        let party = Party::new(5, false);
        let groups = restore(&party, &[3, 2], None).unwrap();
        for (group, size) in groups.iter().zip([3, 2]) {
            assert!(group.done.is_empty(), "{:?}", group.done);
            let samples: Vec<u32> = (group.paused.iter())
                .map(|paused| paused.episode.trajectory().sample)
                .collect();
            assert_eq!(samples, (0..size).collect::<Vec<_>>());
        }
        assert_eq!(*party.in_step.lock().unwrap(), 5);
    }

    #[test]
    fn who_waits_for_a_server_still_stops() {
        let party = Party::new(2, true);
        let outcome = restore(&party, &[2], None);
        assert!(
            matches!(outcome, Err(RolloutError::Stopped)),
            "{:?}",
            outcome.is_ok()
        );
        assert!(*party.asked.lock().unwrap() > 0, "it waited");
    }

    #[test]
    fn an_episode_that_is_lost_takes_no_other_with_it() {
        let party = Party::new(1, false);
        let groups = restore(&party, &[2], Some(1)).unwrap();
        let [group] = &groups[..] else {
            unreachable!("there is one");
        };
        assert_eq!(group.paused.len(), 1);
        let Status::Failed { reason } = &group.done[0].status else {
            unreachable!("it has failed");
        };
        assert!(
            reason.ends_with("was resumed: it has closed the connection"),
            "{reason}"
        );
    }
}
