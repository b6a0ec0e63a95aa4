//! The end of a Harbor trial: what is kept of the agent's actor, and the verifier.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ActorSandbox;
use crate::actor::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorSpec, Entry, FileTree, TreeLimits,
};
use crate::grader::{Verification, VerifyJob, verify};
use crate::task::harbor::{Artifact, HarborPart, TaskConfig, VerifierMode};

/// Where agents put what is to be kept without being asked for.
const CONVENTION: &str = "/logs/artifacts";

/// Something that was kept of the agent's actor.
#[derive(Debug)]
pub struct KeptArtifact {
    /// Where it was.
    pub source: PathBuf,
    /// Where it belongs, below the folder of the trial's artifacts.
    pub destination: PathBuf,
    /// What was there, or why it could not be had: nothing was there, or what the agent left cannot be taken.
    pub tree: Result<FileTree, ActorError>,
}

/// How a trial, or a step of it, was judged.
#[derive(Debug)]
pub struct HarborJudgement {
    /// What the verifier left.
    pub verification: Verification,
    /// What was kept.
    pub artifacts: Vec<KeptArtifact>,
}

/// Judges what the agent left in its actor, once it is done. A verifier that runs out of its time has it once more.
///
/// A shared verifier runs there; a separate one in a new actor of `backend` from `spec`, which is given
/// the artifacts where they were and sees nothing else of the agent's. Commands that the task runs
/// before its artifacts are taken may fail.
///
/// # Errors
///
/// Fails where an actor does; whatever the verifier does is in the judgement.
pub fn judge_trial(
    backend: &dyn ActorBackend,
    spec: &ActorSpec,
    config: &TaskConfig,
    part: &HarborPart,
    job: &VerifyJob,
    agent: &dyn Actor,
) -> Result<HarborJudgement, ActorError> {
    let own = part.step.as_ref().map(|step| &step.verifier.collect);
    for hook in config
        .verifier
        .collect
        .iter()
        .chain(own.into_iter().flatten())
    {
        let mut command = ActorCommand::shell(hook.command.clone());
        command.timeout = Duration::try_from_secs_f64(hook.timeout_sec).unwrap_or(Duration::MAX);
        agent.exec(&command)?;
    }
    let artifacts = |agent| {
        let own = part.step.as_ref().map(|step| &step.artifacts);
        keep(
            agent,
            config.artifacts.iter().chain(own.into_iter().flatten()),
        )
    };
    if part.verifier_mode == VerifierMode::Shared {
        let verification = verify_patiently(agent, job);
        return Ok(HarborJudgement {
            verification,
            artifacts: artifacts(agent)?,
        });
    }
    let artifacts = artifacts(agent)?;
    let verifier = backend.create(spec)?;
    for artifact in &artifacts {
        if let Ok(tree) = &artifact.tree {
            let tree = &without_links(tree)?;
            // A folder has its own path; a file is an entry of the folder that it is in.
            let parent = artifact.source.parent().unwrap_or_else(|| Path::new("/"));
            let is_file = tree.len() == 1
                && artifact
                    .source
                    .file_name()
                    .is_some_and(|name| tree.file(name).is_some());
            verifier.put(if is_file { parent } else { &artifact.source }, tree)?;
        }
    }
    let verification = verify_patiently(verifier.as_ref(), job);
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

/// Reads what is to be kept of an actor.
///
/// # Errors
///
/// Fails where the actor does by our fault; what the agent brought about is in what is kept.
fn keep<'a>(
    agent: &dyn Actor,
    artifacts: impl Iterator<Item = &'a Artifact>,
) -> Result<Vec<KeptArtifact>, ActorError> {
    let declared: Vec<&Artifact> = artifacts.collect();
    let has_convention =
        (declared.iter()).any(|artifact| artifact.source().trim_end_matches('/') == CONVENTION);
    let convention = Artifact::Path(CONVENTION.to_owned());
    let implied = (!has_convention).then_some(&convention);
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
            let tree =
                (agent.get(&source, TreeLimits::default())).and_then(|tree| without(tree, exclude));
            match tree {
                Err(error) if !error.is_guests_doing() => Err(error),
                tree => Ok(KeptArtifact {
                    destination: PathBuf::from(destination),
                    tree,
                    source,
                }),
            }
        })
        .collect()
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
