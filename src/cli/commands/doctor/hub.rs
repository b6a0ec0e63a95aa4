//! The hub: whether it answers, whether it takes the token, and whether it has what the run names.

use std::path::Path;
use std::time::{Duration, SystemTime};

use super::finding::Finding;
use super::{Scope, clock};
use crate::causes::with_causes;
use crate::config::RunConfig;
use crate::hub::{Hub, HubAnswer, HubRepo, HubRepoKind, HubToken};
use crate::task::TaskSource;

/// How long the hub may take to say whose token it is.
const LIMIT: Duration = Duration::from_secs(8);

/// Returns the repositories that a run names.
fn repositories(config: &RunConfig) -> Vec<(HubRepo, HubRepoKind)> {
    let model = &config.model;
    let mut found = Vec::new();
    if !model.path.is_empty() && !Path::new(&model.path).exists() && !model.path.ends_with(".gguf")
    {
        let name = match &model.revision {
            Some(revision) => format!("{}@{revision}", model.path),
            None => model.path.clone(),
        };
        found.extend(
            name.parse()
                .ok()
                .map(|repository| (repository, HubRepoKind::Model)),
        );
    }
    let task = [Some(&config.task.path), config.task.eval_path.as_ref()];
    let environments = config.environments.values();
    let others = environments.flat_map(|other| [Some(&other.path), other.eval_path.as_ref()]);
    for path in task.into_iter().chain(others).flatten() {
        if let Ok(TaskSource::Hub { repo, revision, .. }) = path.parse::<TaskSource>() {
            let repository = format!("{repo}@{revision}").parse().ok();
            found.extend(repository.map(|repository| (repository, HubRepoKind::Dataset)));
        }
    }
    found.dedup();
    found
}

/// Whether a run names something of the hub.
pub(super) fn is_needed(config: &RunConfig) -> bool {
    !repositories(config).is_empty()
}

/// Whether the cache has all of a repository.
fn is_cached(hub: &Hub, repository: &HubRepo, kind: HubRepoKind) -> bool {
    let cache = Hub::offline(hub.cache_folder());
    match kind {
        HubRepoKind::Model => cache.model_folder(repository).is_ok(),
        HubRepoKind::Dataset => cache.dataset_folder(repository).is_ok(),
    }
}

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let hub = Hub::from_env();
    let named = match scope.has_run {
        true => repositories(&scope.config),
        false => Vec::new(),
    };
    if scope.has_run && named.is_empty() {
        return Vec::new();
    }
    let (cached, absent): (Vec<_>, Vec<_>) =
        (named.into_iter()).partition(|(repository, kind)| is_cached(&hub, repository, *kind));
    let mut findings: Vec<Finding> = (cached.iter())
        .map(|(repository, _)| Finding::fine("hub", format!("`{repository}` is in the cache")))
        .collect();
    if hub.is_offline() {
        findings.push(Finding::note(
            "hub",
            "it is not asked, since `HF_HUB_OFFLINE` is set",
        ));
        findings.extend(absent.iter().map(|(repository, kind)| {
            let about = format!("`{repository}` is not in the cache, and `HF_HUB_OFFLINE` is set");
            let fix = format!("unset HF_HUB_OFFLINE && {}", download(repository, *kind));
            Finding::wrong("hub", about, fix)
        }));
        return findings;
    }
    if scope.has_run && absent.is_empty() {
        return findings;
    }
    match hub.ask(LIMIT) {
        Ok(answer) => {
            findings.push(judge(&answer));
            let now = SystemTime::now();
            findings.extend(
                answer
                    .date
                    .iter()
                    .map(|date| clock::compare(&answer.endpoint, date, now)),
            );
            findings.extend(
                absent
                    .iter()
                    .map(|(repository, kind)| look_up(&hub, repository, *kind)),
            );
        }
        Err(error) => {
            let why = with_causes(&*error);
            let fix =
                "check the network and `HTTPS_PROXY`, or name a mirror: export HF_ENDPOINT=URL";
            if absent.is_empty() {
                let about = format!("it does not answer: {why}");
                findings.push(Finding::missing("hub", false, about, fix));
            }
            findings.extend(absent.iter().map(|(repository, _)| {
                let about = format!(
                    "`{repository}` is no path here and not in the cache, and the hub does not answer: {why}"
                );
                Finding::wrong("hub", about, format!("correct the path, or {fix}"))
            }));
        }
    }
    findings
}

fn judge(answer: &HubAnswer) -> Finding {
    let HubAnswer {
        endpoint, token, ..
    } = answer;
    match token {
        HubToken::Absent => {
            Finding::fine("hub", format!("`{endpoint}` answers; there is no token"))
        }
        HubToken::Valid { account } => Finding::fine(
            "hub",
            format!("`{endpoint}` knows the token as that of `{account}`"),
        ),
        HubToken::Refused { status } => Finding::wrong(
            "hub",
            format!("`{endpoint}` refuses the token (status {status})"),
            "hf auth login, or `export HF_TOKEN=…` with one that is valid, or `unset HF_TOKEN` where all is \
             public",
        ),
        HubToken::Unknown { status } => Finding::missing(
            "hub",
            false,
            format!("`{endpoint}` answers with status {status} to who asks about the token"),
            "try again later, or correct HF_ENDPOINT",
        ),
    }
}

fn look_up(hub: &Hub, repository: &HubRepo, kind: HubRepoKind) -> Finding {
    match hub.files(repository, kind) {
        Ok(files) => Finding::note(
            "hub",
            format!(
                "`{repository}` is there with {} files, and is downloaded by the run",
                files.len()
            ),
        ),
        Err(error) => Finding::wrong(
            "hub",
            with_causes(&error),
            format!(
                "correct the name, or ask for access on its page and set HF_TOKEN; then {}",
                download(repository, kind)
            ),
        ),
    }
}

fn download(repository: &HubRepo, kind: HubRepoKind) -> String {
    let kind = match kind {
        HubRepoKind::Model => "",
        HubRepoKind::Dataset => "--repo-type dataset ",
    };
    format!(
        "hf download {kind}{} --revision {}",
        repository.name, repository.revision
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn what_the_hub_says_of_a_token_is_judged() {
        let state = |token| {
            judge(&HubAnswer {
                endpoint: "http://127.0.0.1".to_owned(),
                token,
                date: None,
            })
            .state
        };
        assert_eq!(state(HubToken::Absent), State::Fine);
        let account = "me".to_owned();
        assert_eq!(state(HubToken::Valid { account }), State::Fine);
        assert_eq!(state(HubToken::Refused { status: 401 }), State::Wrong);
        assert_eq!(state(HubToken::Unknown { status: 502 }), State::Note);
    }

    #[test]
    fn a_run_names_repositories_where_nothing_is_here() {
        let mut config = RunConfig::default();
        assert!(!is_needed(&config));
        config.model.path = "owner/model".to_owned();
        config.model.revision = Some("v1".to_owned());
        config.task.path = "owner/data".to_owned();
        config.task.eval_path = Some(env!("CARGO_MANIFEST_DIR").to_owned());
        let found = repositories(&config);
        let names: Vec<String> = found.iter().map(|(name, _)| name.to_string()).collect();
        assert_eq!(names, ["owner/model@v1", "owner/data"]);
        assert_eq!(
            download(&found[1].0, found[1].1),
            "hf download --repo-type dataset owner/data --revision main"
        );
    }
}
