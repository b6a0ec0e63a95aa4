//! A control plane by the command `kubectl ate`, where only that can reach it.
//!
//! What it prints is read with patience: as a list or a single object, with states as names or numbers, and
//! whatever is there besides is skipped. Its errors are text; the codes of gRPC in them are looked for.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::api::{
    ActorState, ActorView, ApiError, ApiErrorKind, NewActor, NewTemplate, SubstrateApi, TagView,
    TemplateView,
};
use crate::process;

/// The most that it may print.
const MAX_OUTPUT: usize = 32 << 20;
/// The most of its complaints that is told.
const MAX_TOLD: usize = 500;
/// The end of a log that is kept.
const MAX_LOG: usize = 64 << 10;

/// A control plane by `kubectl ate`, and one atespace of it.
#[derive(Debug)]
pub struct KubectlAte {
    program: PathBuf,
    arguments: Vec<String>,
    atespace: String,
    call_timeout: Duration,
}

impl KubectlAte {
    /// Takes a program, and arguments that come before all others.
    pub(super) fn new(
        program: PathBuf,
        arguments: Vec<String>,
        atespace: &str,
        call_timeout: Duration,
    ) -> Self {
        Self {
            program,
            arguments,
            atespace: atespace.to_owned(),
            call_timeout,
        }
    }

    /// Runs `kubectl ARGUMENTS ate WORDS -a ATESPACE`, and returns what it printed.
    fn run(&self, call: &'static str, words: &[&str], stdin: &[u8]) -> Result<Vec<u8>, ApiError> {
        let failed = |kind, message| ApiError {
            call,
            kind,
            message,
        };
        let mut command = Command::new(&self.program);
        command
            .arg("ate")
            .args(&self.arguments)
            .args(words)
            .args(["-a", &self.atespace]);
        let finished = process::run(
            &mut command,
            stdin,
            self.call_timeout,
            MAX_OUTPUT,
            |_| false,
            |_| (),
        )
        .map_err(|error| {
            let program = self.program.display();
            failed(ApiErrorKind::Other, format!("running `{program}`: {error}"))
        })?;
        if finished.timed_out {
            let limit = self.call_timeout;
            let message = format!("no answer within {limit:?}");
            return Err(failed(ApiErrorKind::Unavailable, message));
        }
        if !finished.is_success() {
            let text = finished.stderr.text();
            let told: String = text.trim().chars().take(MAX_TOLD).collect();
            return Err(failed(kind_of(&text), told));
        }
        if finished.stdout.is_truncated() {
            let message = format!("it printed more than {MAX_OUTPUT} bytes");
            return Err(failed(ApiErrorKind::Other, message));
        }
        Ok(finished.stdout.head)
    }

    /// As [`Self::run`], for an answer in JSON.
    fn ask(&self, call: &'static str, words: &[&str]) -> Result<Value, ApiError> {
        let printed = self.run(call, &[words, &["-o", "json"]].concat(), &[])?;
        serde_json::from_slice(&printed).map_err(|error| ApiError {
            call,
            kind: ApiErrorKind::Other,
            message: format!("it printed no JSON: {error}"),
        })
    }
}

/// Finds out what a complaint is about.
fn kind_of(text: &str) -> ApiErrorKind {
    const KINDS: &[(&str, ApiErrorKind)] = &[
        ("code = NotFound", ApiErrorKind::NotFound),
        ("code = AlreadyExists", ApiErrorKind::Exists),
        ("code = FailedPrecondition", ApiErrorKind::Precondition),
        ("code = Unavailable", ApiErrorKind::Unavailable),
        ("code = DeadlineExceeded", ApiErrorKind::Unavailable),
        ("code = Aborted", ApiErrorKind::Unavailable),
        ("code = ResourceExhausted", ApiErrorKind::Unavailable),
        ("code = PermissionDenied", ApiErrorKind::Denied),
        ("code = Unauthenticated", ApiErrorKind::Denied),
        ("code = Unimplemented", ApiErrorKind::Unimplemented),
        // Of the program itself, where it is older.
        ("unknown command", ApiErrorKind::Unimplemented),
        ("unknown flag", ApiErrorKind::Unimplemented),
        ("failed to connect", ApiErrorKind::Unavailable),
        ("not found", ApiErrorKind::NotFound),
    ];
    let found = KINDS.iter().find(|(mark, _)| text.contains(mark));
    found.map_or(ApiErrorKind::Other, |(_, kind)| *kind)
}

/// Returns the objects of an answer: those of the list of that name, or the answer itself.
fn objects<'a>(answer: &'a Value, list: &str) -> Vec<&'a Value> {
    match (answer.get(list), answer) {
        (Some(Value::Array(objects)), _) | (None, Value::Array(objects)) => {
            objects.iter().collect()
        }
        // An empty list is left out.
        (None, Value::Object(fields)) if !fields.contains_key("metadata") => Vec::new(),
        _ => vec![answer],
    }
}

fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer).and_then(Value::as_str)
}

fn name_of(object: &Value) -> String {
    text(object, "/metadata/name")
        .unwrap_or_default()
        .to_owned()
}

fn actor_view(object: &Value) -> ActorView {
    let state = object
        .pointer("/status/state")
        .or_else(|| object.get("status"));
    ActorView {
        name: name_of(object),
        state: match state {
            Some(Value::String(name)) => ActorState::from_name(name),
            Some(Value::Number(number)) => {
                let number = number
                    .as_i64()
                    .and_then(|number| i32::try_from(number).ok());
                number.map_or(ActorState::Unknown, ActorState::from_number)
            }
            _ => ActorState::Unknown,
        },
        crash: text(object, "/status/crash/message").map(str::to_owned),
    }
}

fn tag_view(object: &Value) -> TagView {
    TagView {
        name: name_of(object),
        is_usable: object.pointer("/status/snapshot").is_some(),
    }
}

fn template_view(object: &Value) -> TemplateView {
    let golden = "/status/goldenSnapshotStatus";
    TemplateView {
        name: name_of(object),
        is_ready: object.pointer(&format!("{golden}/goldenTag")).is_some(),
        error: text(object, &format!("{golden}/errorMessage"))
            .filter(|message| !message.is_empty())
            .map(str::to_owned),
    }
}

fn only<T>(call: &'static str, found: Vec<T>) -> Result<T, ApiError> {
    let nothing = || ApiError {
        call,
        kind: ApiErrorKind::Other,
        message: "it printed no object".to_owned(),
    };
    found.into_iter().next().ok_or_else(nothing)
}

impl SubstrateApi for KubectlAte {
    fn create_actor(&self, actor: &NewActor) -> Result<(), ApiError> {
        let mut words = vec![
            "create",
            "actor",
            &actor.name,
            "--template",
            &actor.template,
        ];
        if let Some(tag) = &actor.source_tag {
            words.extend(["--tag", tag]);
        }
        self.run("create actor", &words, &[]).map(drop)
    }

    fn actor(&self, name: &str) -> Result<ActorView, ApiError> {
        let call = "get actor";
        let answer = self.ask(call, &["get", "actor", name])?;
        let found = objects(&answer, "actors");
        only(call, found.into_iter().map(actor_view).collect())
    }

    fn actors(&self) -> Result<Vec<ActorView>, ApiError> {
        let answer = self.ask("get actors", &["get", "actors"])?;
        let found = objects(&answer, "actors");
        Ok(found.into_iter().map(actor_view).collect())
    }

    fn resume_actor(&self, name: &str) -> Result<(), ApiError> {
        self.run("resume actor", &["resume", "actor", name], &[])
            .map(drop)
    }

    fn suspend_actor(&self, name: &str) -> Result<(), ApiError> {
        self.run("suspend actor", &["suspend", "actor", name], &[])
            .map(drop)
    }

    fn delete_actor(&self, name: &str) -> Result<(), ApiError> {
        let words = ["delete", "actor", name];
        let anyhow = [&words[..], &["--any-state"]].concat();
        match self.run("delete actor", &anyhow, &[]) {
            // An older one, which deletes what is suspended.
            Err(error) if error.kind == ApiErrorKind::Unimplemented => {
                self.run("delete actor", &words, &[]).map(drop)
            }
            done => done.map(drop),
        }
    }

    fn deny_egress(&self, name: &str) -> Result<(), ApiError> {
        let words = ["create", "egress-policy", name, "-f", "-"];
        let policy =
            json!({"metadata": {"atespace": self.atespace, "name": "default"}, "rules": []});
        self.run(
            "create egress-policy",
            &words,
            policy.to_string().as_bytes(),
        )
        .map(drop)
    }

    fn create_tag(&self, name: &str, actor: &str) -> Result<(), ApiError> {
        let words = ["create", "tag", name, "--actor", actor];
        self.run("create tag", &words, &[]).map(drop)
    }

    fn tags(&self) -> Result<Vec<TagView>, ApiError> {
        let answer = self.ask("get tags", &["get", "tags"])?;
        let found = objects(&answer, "tags");
        Ok(found.into_iter().map(tag_view).collect())
    }

    fn tag(&self, name: &str) -> Result<TagView, ApiError> {
        let call = "get tag";
        let answer = self.ask(call, &["get", "tag", name])?;
        let found = objects(&answer, "tags");
        only(call, found.into_iter().map(tag_view).collect())
    }

    fn delete_tag(&self, name: &str) -> Result<(), ApiError> {
        self.run("delete tag", &["delete", "tag", name], &[])
            .map(drop)
    }

    fn create_template(&self, template: &NewTemplate) -> Result<(), ApiError> {
        let manifest = manifest(&self.atespace, template).to_string();
        // The manifest names its atespace; the flag is there for all.
        let words = ["create", "actor-template", "-f", "-"];
        self.run("create actor-template", &words, manifest.as_bytes())
            .map(drop)
    }

    fn templates(&self) -> Result<Vec<TemplateView>, ApiError> {
        let answer = self.ask("get actor-templates", &["get", "actor-templates"])?;
        let found = objects(&answer, "actorTemplates");
        Ok(found.into_iter().map(template_view).collect())
    }

    fn template(&self, name: &str) -> Result<TemplateView, ApiError> {
        let call = "get actor-template";
        let answer = self.ask(call, &["get", "actor-template", name])?;
        let found = objects(&answer, "actorTemplates");
        only(call, found.into_iter().map(template_view).collect())
    }

    fn delete_template(&self, name: &str) -> Result<(), ApiError> {
        let words = ["delete", "actor-template", name];
        self.run("delete actor-template", &words, &[]).map(drop)
    }

    fn logs(&self, name: &str) -> Result<String, ApiError> {
        let printed = self.run("logs", &["logs", "actors", name], &[])?;
        let end = &printed[printed.len().saturating_sub(MAX_LOG)..];
        Ok(String::from_utf8_lossy(end).into_owned())
    }
}

/// Returns a template as protobuf's JSON has it.
fn manifest(atespace: &str, template: &NewTemplate) -> Value {
    let env: Vec<Value> = template
        .env
        .iter()
        .map(|(name, value)| json!({"name": name, "value": value}))
        .collect();
    let mut limits = vec![json!({"name": "memory", "quantity": template.memory.to_string()})];
    if let Some(cpu) = &template.cpu {
        limits.push(json!({"name": "cpu", "quantity": cpu}));
    }
    let mut container = json!({
        "name": "sandboxd",
        "image": template.image,
        "command": template.command,
        "env": env,
        "wakeupProbe": {
            "httpGet": {"path": "/readyz", "port": template.port},
            "timeoutSeconds": 60,
        },
    });
    let mut manifest = json!({
        "metadata": {"atespace": atespace, "name": template.name},
        "snapshotConfig": {
            "onCommit": "SNAPSHOT_CONTENT_SCOPE_FULL",
            "storageLocation": template.storage_location,
        },
        "sandboxConfig": {
            "sandboxClass": "SANDBOX_CLASS_GVISOR",
            "configName": template.sandbox_config,
        },
        "resources": {"limits": limits},
    });
    if let Some((reference, folder)) = &template.volume {
        container["volumeMounts"] = json!([{"name": "wardian", "mountPath": folder}]);
        manifest["volumes"] = json!([{"name": "wardian", "image": {"reference": reference}}]);
    }
    if !template.worker_labels.is_empty() {
        manifest["workerSelector"] = json!({"matchLabels": template.worker_labels});
    }
    manifest["containers"] = json!([container]);
    manifest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_with_patience() {
        let one = json!({
            "metadata": {"name": "a", "version": "12", "new": {}},
            "status": {"state": "ACTOR_STATE_CRASHED", "crash": {"message": "why"}},
        });
        let list = json!({"actors": [one], "nextPageToken": ""});
        for answer in [&one, &list, &json!([one])] {
            let found: Vec<_> = objects(answer, "actors")
                .into_iter()
                .map(actor_view)
                .collect();
            let expected = ActorView {
                name: "a".to_owned(),
                state: ActorState::Crashed,
                crash: Some("why".to_owned()),
            };
            assert_eq!(found, [expected], "{answer}");
        }
        assert!(objects(&json!({}), "actors").is_empty());
        let number = json!({"metadata": {"name": "a"}, "status": {"state": 2}});
        assert_eq!(actor_view(&number).state, ActorState::Running);
        assert_eq!(
            actor_view(&json!({"status": 1e300})).state,
            ActorState::Unknown
        );
        let template = json!({"metadata": {"name": "t"}, "status": {"goldenSnapshotStatus":
            {"errorMessage": "ImagePull: no such image"}}});
        assert_eq!(
            template_view(&template).error.as_deref(),
            Some("ImagePull: no such image")
        );
    }

    #[test]
    fn complaints_have_kinds() {
        for (text, kind) in [
            (
                "Error: failed to get actor: rpc error: code = NotFound desc = no such actor",
                ApiErrorKind::NotFound,
            ),
            (
                "rpc error: code = Unavailable desc = no free workers available",
                ApiErrorKind::Unavailable,
            ),
            (
                "Error: unknown command \"tag\" for \"ate create\"",
                ApiErrorKind::Unimplemented,
            ),
            (
                "Error: actor \"a\" in atespace \"b\" not found",
                ApiErrorKind::NotFound,
            ),
            ("segmentation fault", ApiErrorKind::Other),
        ] {
            assert_eq!(kind_of(text), kind, "{text}");
        }
    }
}
