//! The end of a Harbor trial: what is handed to the verifier, and the verifier.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::precedence::Precedence;
use super::{ActorSandbox, users};
use crate::actor::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorSpec, Ending, Entry, FileTree, TreeLimits,
    User,
};
use crate::grader::{GradingUser, Verification, VerifyJob, verify};
use crate::task::harbor::{Artifact, HarborPart, TaskConfig, VerifierMode};

/// Where agents put what is to be kept without being asked for.
const CONVENTION: &str = "/logs/artifacts";

/// Something that was handed from the agent's actor to the verifier's.
#[derive(Debug)]
pub struct KeptArtifact {
    /// Where it was, and is.
    pub source: PathBuf,
    /// Where it belongs, below the folder of the trial's artifacts.
    pub destination: PathBuf,
    /// How many bytes it has, or why it could not be had: nothing was there, or what the agent left cannot be taken.
    pub bytes: Result<u64, ActorError>,
}

/// How a trial, or a step of it, was judged.
#[derive(Debug)]
pub struct HarborJudgement {
    /// What the verifier left.
    pub verification: Verification,
    /// What a separate verifier was given; a shared one needs nothing, and nothing is taken for it.
    pub artifacts: Vec<KeptArtifact>,
}

/// Judges what the agent left in its actor, once it is done. A verifier that runs out of its time has it once more.
///
/// A shared verifier runs there; a separate one in a new actor of `backend` from `spec`, which is given
/// the artifacts where they were and sees nothing else of the agent's. Of these there may be `artifacts` bytes
/// together; one at a time is in memory. Commands that the task runs before its artifacts are taken may fail.
///
/// # Errors
///
/// Fails where an actor does, and where there are more artifacts; whatever the verifier does is in the judgement.
pub fn judge_trial(
    backend: &dyn ActorBackend,
    spec: &ActorSpec,
    config: &TaskConfig,
    part: &HarborPart,
    mut job: VerifyJob,
    agent: &dyn Actor,
    artifacts: u64,
) -> Result<HarborJudgement, ActorError> {
    let _first = Precedence::of(agent);
    let own = part.step.as_ref().map(|step| &step.verifier.collect);
    for hook in config
        .verifier
        .collect
        .iter()
        .chain(own.into_iter().flatten())
    {
        let mut command = ActorCommand::shell(hook.command.clone());
        command.user = users::find(backend, agent, hook.user.as_ref())?;
        command.timeout = Duration::try_from_secs_f64(hook.timeout_sec).unwrap_or(Duration::MAX);
        if let Ending::TimedOut { .. } = agent.exec(&command)?.ending {
            // As a verifier, it has its time once more.
            agent.exec(&command)?;
        }
    }
    let mut verify_in = |actor: &dyn Actor| -> Result<Verification, ActorError> {
        let user = users::find(backend, actor, part.verifier_user(config))?;
        job.user = user.map(|User { uid, gid }| GradingUser { uid, gid });
        Ok(verify_patiently(actor, &job))
    };
    if part.verifier_mode == VerifierMode::Shared {
        return Ok(HarborJudgement {
            verification: verify_in(agent)?,
            artifacts: Vec::new(),
        });
    }
    let own = part.step.as_ref().map(|step| &step.artifacts);
    let declared = config.artifacts.iter().chain(own.into_iter().flatten());
    let verifier = backend.create(spec)?;
    let (artifacts, verification) = {
        let _first = Precedence::of(&*verifier);
        let artifacts = hand_over(agent, &*verifier, declared, artifacts)?;
        (artifacts, verify_in(&*verifier)?)
    };
    verifier.destroy()?;
    Ok(HarborJudgement {
        verification,
        artifacts,
    })
}

/// Runs a verifier, and once more where it ran out of its time: what others do to this machine makes it late, too.
/// What the first try left running is ended before the second.
fn verify_patiently(actor: &dyn Actor, job: &VerifyJob) -> Verification {
    let sandbox = ActorSandbox::new(actor);
    let first = verify(&sandbox, job);
    if !first.timed_out {
        return first;
    }
    let second = verify(&sandbox, job);
    Verification {
        timed_out: second.rewards.is_err(),
        ..second
    }
}

/// Leaves out all links: in the verifier's actor they could lead, one through the other, to its own files, such as
/// what is expected of the agent.
fn without_links(tree: &FileTree) -> Result<FileTree, ActorError> {
    let mut kept = FileTree::new();
    let entries = tree
        .iter()
        .filter(|(_, entry)| !matches!(entry, Entry::Link { .. }));
    for (path, entry) in entries {
        kept.insert(path, entry.clone())?;
    }
    Ok(kept)
}

/// Hands what is to be kept from the agent's actor to the verifier's, one after another.
///
/// # Errors
///
/// Fails where an actor does by our fault or is late, and where there is more than `most` bytes; what else the agent
/// brought about is in what is kept.
fn hand_over<'a>(
    agent: &dyn Actor,
    verifier: &dyn Actor,
    artifacts: impl Iterator<Item = &'a Artifact>,
    most: u64,
) -> Result<Vec<KeptArtifact>, ActorError> {
    let declared: Vec<&Artifact> = artifacts.collect();
    let has_convention =
        (declared.iter()).any(|artifact| artifact.source().trim_end_matches('/') == CONVENTION);
    let convention = Artifact::Path(CONVENTION.to_owned());
    let implied = (!has_convention).then_some(&convention);
    let mut left = TreeLimits {
        bytes: most,
        ..TreeLimits::default()
    };
    (implied.into_iter().chain(declared))
        .map(|artifact| {
            let source = agent.spec().workdir.join(artifact.source());
            let (destination, exclude) = match artifact {
                Artifact::Full(full) => (full.destination.as_deref(), full.exclude.as_slice()),
                Artifact::Path(_) => (None, &[][..]),
            };
            let destination = destination
                .unwrap_or_else(|| artifact.source())
                .trim_start_matches('/');
            let tree = agent
                .get(&source, left)
                .and_then(|tree| without(tree, exclude));
            let bytes = match tree {
                Err(ActorError::TreeTooLarge { unit, .. }) => {
                    let limit = match unit {
                        "bytes" => most,
                        _ => TreeLimits::default().entries,
                    };
                    return Err(ActorError::TooManyArtifacts { limit, unit });
                }
                // What was late is not missing.
                Err(error) if !error.is_guests_doing() || error.is_late() => return Err(error),
                Err(error) => Err(error),
                Ok(tree) => {
                    let bytes = bytes_of(&tree);
                    left.bytes = left.bytes.saturating_sub(bytes);
                    left.entries = left.entries.saturating_sub(tree.len() as u64);
                    put(verifier, &source, &without_links(&tree)?)?;
                    Ok(bytes)
                }
            };
            Ok(KeptArtifact {
                destination: PathBuf::from(destination),
                bytes,
                source,
            })
        })
        .collect()
}

fn bytes_of(tree: &FileTree) -> u64 {
    let sizes = tree.iter().map(|(_, entry)| match entry {
        Entry::File { bytes, .. } => bytes.len() as u64,
        Entry::Folder | Entry::Link { .. } => 0,
    });
    sizes.sum()
}

/// Puts what was at a path there in another actor.
fn put(actor: &dyn Actor, source: &Path, tree: &FileTree) -> Result<(), ActorError> {
    // A folder has its own path; a file is an entry of the folder that it is in.
    let parent = source.parent().unwrap_or_else(|| Path::new("/"));
    let is_file = tree.len() == 1
        && source
            .file_name()
            .is_some_and(|name| tree.file(name).is_some());
    actor.put(if is_file { parent } else { source }, tree)
}

/// Leaves out what one of the patterns matches, and what is in it.
fn without(tree: FileTree, patterns: &[String]) -> Result<FileTree, ActorError> {
    if patterns.is_empty() {
        return Ok(tree);
    }
    let mut kept = FileTree::new();
    for (path, entry) in tree.iter() {
        let is_left_out = path.ancestors().any(|part| {
            let part = part.to_string_lossy();
            patterns.iter().any(|pattern| is_excluded(pattern, &part))
        });
        if !is_left_out {
            kept.insert(path, entry.clone())?;
        }
    }
    Ok(kept)
}

/// Whether a pattern of `tar --exclude` matches a path, or its end from some `/` on.
fn is_excluded(pattern: &str, path: &str) -> bool {
    let pattern = pattern.trim_end_matches('/').as_bytes();
    let starts = path.match_indices('/').map(|(at, _)| at + 1);
    [0].into_iter().chain(starts).any(|start| {
        path.get(start..)
            .is_some_and(|end| !end.is_empty() && matches(pattern, end.as_bytes()))
    })
}

/// Matches `*` and `?`, both of which match a `/`, too, as in `tar`.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    // Where the last `*` was, and how much of the text it has taken.
    let mut star: Option<(usize, usize)> = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at + 1, seen));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[seen] => {
                at += 1;
                seen += 1;
            }
            _ => {
                let Some((after, taken)) = star else {
                    return false;
                };
                star = Some((after, taken + 1));
                (at, seen) = (after, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn links_are_no_part_of_an_artifact() {
        let mut tree = FileTree::of_file("answer", "1").unwrap();
        // One leads out by itself, one through the other.
        for (path, target) in [
            ("up", "/tests/expected"),
            ("d/up", ".."),
            ("x", "d/up/../y"),
        ] {
            let target = PathBuf::from(target);
            tree.insert(path, Entry::Link { target }).unwrap();
        }
        let kept = without_links(&tree).unwrap();
        let paths: Vec<&Path> = kept.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, [Path::new("answer")]);
    }

    #[rstest]
    #[case("*.pyc", "a/b/c.pyc", true)]
    #[case("cache", "a/cache", true)]
    #[case("cache/", "cache", true)]
    #[case("a/*/c", "a/b/c", true)]
    #[case("a*c", "a/b/c", true)]
    #[case("?.txt", "x/a.txt", true)]
    #[case("cache", "a/cached", false)]
    #[case("b", "a/bc", false)]
    #[case("*x*y*", "axbyc", true)]
    #[case("*x*y*", "aybxc", false)]
    fn patterns_match_as_in_tar(#[case] pattern: &str, #[case] path: &str, #[case] expected: bool) {
        assert_eq!(is_excluded(pattern, path), expected);
    }
}
