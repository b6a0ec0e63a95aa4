//! A `kubectl` with the plugin `ate`: a script that hands its arguments to the control plane of the tests, which answers
//! as the plugin prints.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use tonic::Status;
use wardian::actor::substrate::messages as m;

use super::control::{ATESPACE, Control};
use crate::actor::sandboxd::read_request;

/// Writes the script, and answers it from now on.
pub(super) fn start(control: Arc<Control>) -> PathBuf {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let script = format!(
        r#"#!/usr/bin/env python3
import json, sys, urllib.request
asked = json.dumps({{"argv": sys.argv[1:], "stdin": sys.stdin.read()}}).encode()
with urllib.request.urlopen("http://{address}/", asked) as response:
    answer = json.load(response)
sys.stdout.write(answer["stdout"])
sys.stderr.write(answer["stderr"])
sys.exit(answer["code"])
"#
    );
    let path = control.base().join("kubectl");
    fs_err::write(&path, script).unwrap();
    fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, control) = (stream.unwrap(), Arc::clone(&control));
            std::thread::spawn(move || {
                let request = read_request(&mut stream);
                let body = request
                    .windows(4)
                    .position(|end| end == b"\r\n\r\n")
                    .unwrap()
                    + 4;
                let asked: Value = serde_json::from_slice(&request[body..]).unwrap();
                let argv: Vec<String> = serde_json::from_value(asked["argv"].clone()).unwrap();
                let stdin = asked["stdin"].as_str().unwrap();
                let answer = match run(&control, &argv, stdin) {
                    Ok(stdout) => json!({"code": 0, "stdout": stdout, "stderr": ""}),
                    Err(status) => json!({"code": 1, "stdout": "", "stderr": format!(
                        "Error: failed: rpc error: code = {:?} desc = {}\n", status.code(), status.message()
                    )}),
                }
                .to_string();
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    answer.len()
                );
                stream
                    .write_all((head + &answer).as_bytes())
                    .unwrap_or_default();
            });
        }
    });
    path
}

fn run(c: &Control, argv: &[String], stdin: &str) -> Result<String, Status> {
    let mut words = Vec::new();
    let mut flags: BTreeMap<&str, &str> = BTreeMap::new();
    let mut rest = argv.iter().map(String::as_str).peekable();
    while let Some(word) = rest.next() {
        match word {
            "--any-state" => drop(flags.insert(word, "true")),
            flag if flag.starts_with('-') => drop(flags.insert(flag, rest.next().unwrap())),
            word => words.push(word),
        }
    }
    assert_eq!(flags.get("-a"), Some(&ATESPACE), "{argv:?}");
    let [ate, verb, kind, name @ ..] = &words[..] else {
        panic!("{argv:?}");
    };
    assert_eq!(*ate, "ate");
    let reference = |name: &str| {
        Some(m::ObjectRef {
            atespace: ATESPACE.to_owned(),
            name: name.to_owned(),
        })
    };
    let metadata = |name: &str| {
        Some(m::Metadata {
            atespace: ATESPACE.to_owned(),
            name: name.to_owned(),
        })
    };
    let printed = |value: Value| Ok(format!("{value:#}\n"));
    match (*verb, *kind, name) {
        ("create", "actor", [name]) => {
            let actor = m::Actor {
                metadata: metadata(name),
                actor_template: reference(flags["--template"]),
                source_tag: flags.get("--tag").and_then(|tag| reference(tag)),
                status: None,
            };
            printed(actor_json(&c.create_actor(Some(actor))?))
        }
        ("get", "actor", [name]) => {
            printed(json!({"actors": [actor_json(&c.get_actor(reference(name))?)]}))
        }
        ("get", "actors", []) => match &c.list_actors()[..] {
            // Protobuf's JSON leaves empty lists out.
            [] => printed(json!({})),
            actors => printed(json!({"actors": actors.iter().map(actor_json).collect::<Vec<_>>()})),
        },
        ("resume", "actor", [name]) => c
            .resume_actor(reference(name))
            .map(|_| "resumed\n".to_owned()),
        ("suspend", "actor", [name]) => c
            .suspend_actor(reference(name))
            .map(|_| "suspended\n".to_owned()),
        ("delete", "actor", [name]) => {
            let any = flags.contains_key("--any-state");
            if any && !c.has_any_state() {
                return Err(Status::unknown("unknown flag: --any-state"));
            }
            c.delete_actor(reference(name), any)
                .map(|_| "deleted\n".to_owned())
        }
        ("create", "egress-policy", [name]) => {
            let policy: Value = serde_json::from_str(stdin).unwrap();
            assert_eq!(policy["rules"], json!([]));
            c.create_policy(reference(name))
                .map(|_| "created\n".to_owned())
        }
        ("create", "tag", [name]) => {
            let tag = m::Tag {
                metadata: metadata(name),
                status: None,
                scope: 1,
                source_actor: reference(flags["--actor"]),
            };
            printed(tag_json(&c.create_tag(Some(tag))?))
        }
        ("get", "tag", [name]) => printed(tag_json(&c.get_tag(reference(name))?)),
        ("get", "tags", []) => {
            printed(json!({"tags": c.list_tags().iter().map(tag_json).collect::<Vec<_>>()}))
        }
        ("delete", "tag", [name]) => c
            .delete_tag(reference(name))
            .map(|_| "deleted\n".to_owned()),
        ("create", "actor-template", []) => {
            let manifest: Value = serde_json::from_str(stdin).unwrap();
            c.create_template(Some(template(&manifest)))
                .map(|_| "created\n".to_owned())
        }
        ("get", "actor-template", [name]) => {
            printed(json!({"actorTemplates": [template_json(&c.get_template(reference(name))?)]}))
        }
        ("get", "actor-templates", []) => {
            let all: Vec<_> = c.list_templates().iter().map(template_json).collect();
            printed(json!({"actorTemplates": all}))
        }
        ("delete", "actor-template", [name]) => c
            .delete_template(reference(name))
            .map(|_| "deleted\n".to_owned()),
        ("logs", "actors", [_]) => Ok("a line of the actor's\n".to_owned()),
        _ => panic!("{argv:?}"),
    }
}

fn actor_json(actor: &m::Actor) -> Value {
    const STATES: [&str; 8] = [
        "UNSPECIFIED",
        "RESUMING",
        "RUNNING",
        "SUSPENDING",
        "SUSPENDED",
        "PAUSING",
        "PAUSED",
        "CRASHED",
    ];
    let status = actor.status.clone().unwrap_or_default();
    let state = STATES[usize::try_from(status.state).unwrap()];
    let mut json = json!({
        "metadata": {"atespace": ATESPACE, "name": actor.metadata.as_ref().unwrap().name, "version": "3"},
        "status": {"state": format!("ACTOR_STATE_{state}")},
    });
    if let Some(crash) = status.crash {
        json["status"]["crash"] = json!({"message": crash.message});
    }
    json
}

fn tag_json(tag: &m::Tag) -> Value {
    json!({
        "metadata": {"atespace": ATESPACE, "name": tag.metadata.as_ref().unwrap().name},
        "status": {"snapshot": {"snapshotUri": "file:///"}},
        "scope": "TAG_SCOPE_ATESPACE",
    })
}

fn template_json(template: &m::ActorTemplate) -> Value {
    let status = template.status.clone().unwrap_or_default();
    let golden = status.golden_snapshot_status.unwrap_or_default();
    let mut json = json!({
        "metadata": {"atespace": ATESPACE, "name": template.metadata.as_ref().unwrap().name},
        "status": {"goldenSnapshotStatus": {}},
    });
    if let Some(tag) = golden.golden_tag {
        json["status"]["goldenSnapshotStatus"]["goldenTag"] = json!({"name": tag.name});
    }
    if !golden.error_message.is_empty() {
        json["status"]["goldenSnapshotStatus"]["errorMessage"] = json!(golden.error_message);
    }
    json
}

/// Reads a manifest, of what the cases look at.
fn template(manifest: &Value) -> m::ActorTemplate {
    let text = |pointer: &str| {
        let found = manifest.pointer(pointer).and_then(Value::as_str);
        found
            .unwrap_or_else(|| panic!("no {pointer} in {manifest}"))
            .to_owned()
    };
    let limits = manifest["resources"]["limits"].as_array().unwrap();
    m::ActorTemplate {
        metadata: Some(m::Metadata {
            atespace: text("/metadata/atespace"),
            name: text("/metadata/name"),
        }),
        containers: vec![m::Container {
            name: text("/containers/0/name"),
            image: text("/containers/0/image"),
            command: serde_json::from_value(manifest["containers"][0]["command"].clone()).unwrap(),
            env: vec![m::Variable {
                name: text("/containers/0/env/0/name"),
                value: text("/containers/0/env/0/value"),
            }],
            wakeup_probe: Some(m::WakeupProbe {
                http_get: Some(m::HttpGet {
                    path: text("/containers/0/wakeupProbe/httpGet/path"),
                    port: 80,
                }),
                timeout_seconds: 60,
            }),
            ..m::Container::default()
        }],
        volumes: vec![m::Volume {
            name: text("/volumes/0/name"),
            image: Some(m::ImageVolume {
                reference: text("/volumes/0/image/reference"),
            }),
        }],
        snapshot_config: Some(m::SnapshotConfig {
            on_commit: i32::from(text("/snapshotConfig/onCommit").ends_with("_FULL")),
            storage_location: text("/snapshotConfig/storageLocation"),
        }),
        resources: Some(m::Resources {
            limits: limits
                .iter()
                .map(|limit| m::Limit {
                    name: limit["name"].as_str().unwrap().to_owned(),
                    quantity: limit["quantity"].as_str().unwrap().to_owned(),
                })
                .collect(),
        }),
        ..m::ActorTemplate::default()
    }
}
