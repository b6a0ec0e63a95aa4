//! The manifests of `deploy/kubernetes`: that they are safe, and that they say what the program knows.
//!
//! Files are read one by one, patches aside; where there is a `kubectl`, overlays are read as it renders them, too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use wardian::config::RunConfig;

/// What builds images has rights that nothing else has, in a namespace of its own.
const BUILDS: &str = "wardian-builds";

/// A document of a manifest, and where it is.
struct Document {
    place: String,
    value: Value,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes")
}

fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it is read").path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn parse(place: &str, text: &str) -> Vec<Document> {
    let values: Vec<Value> =
        serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{place}: {error}"));
    let documents = values.into_iter().filter(|value| !value.is_null());
    documents
        .map(|value| Document {
            place: format!(
                "{place}: {} {}",
                text_of(&value["kind"]),
                text_of(&value["metadata"]["name"])
            ),
            value,
        })
        .collect()
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the documents of all files that are whole by themselves.
fn written() -> Vec<Document> {
    let mut documents = Vec::new();
    for file in files(&root(), ".yaml") {
        let name = file.file_name().expect("it has a name").to_string_lossy();
        if name == "kustomization.yaml" || name.starts_with("patch-") {
            continue;
        }
        let text = fs_err::read_to_string(&file).expect("it is read");
        documents.extend(parse(&file.display().to_string(), &text));
    }
    documents
}

/// Returns the documents of an overlay or a folder with a component as `kubectl` renders them; none without one.
#[expect(
    clippy::print_stdout,
    reason = "what is skipped is told with the test's output"
)]
fn rendered(folder: &Path) -> Option<Vec<Document>> {
    let output = Command::new("kubectl")
        .arg("kustomize")
        .arg(folder)
        .output();
    let Ok(output) = output else {
        println!(
            "skipped: there is no `kubectl` to render {}",
            folder.display()
        );
        return None;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", folder.display());
    let text = String::from_utf8(output.stdout).expect("it renders UTF-8");
    Some(parse(&folder.display().to_string(), &text))
}

/// Returns each component over the base, and each overlay, as far as they can be rendered here.
fn all_rendered() -> Vec<Vec<Document>> {
    let mut all = Vec::new();
    for entry in fs_err::read_dir(root().join("overlays")).expect("there are overlays") {
        all.extend(rendered(&entry.expect("it is read").path()));
    }
    for entry in fs_err::read_dir(root().join("components")).expect("there are components") {
        let name = entry.expect("it is read").file_name();
        // Beside the others, for paths that lead there.
        let overlays = root().join("overlays");
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let tree = scratch.path().join("kubernetes");
        let copied = Command::new("cp")
            .arg("-r")
            .args([root(), tree.clone()])
            .status()
            .expect("cp runs");
        assert!(copied.success(), "{}", overlays.display());
        let overlay = tree.join("overlays/one");
        fs_err::create_dir(&overlay).expect("a folder");
        let text = format!(
            "kind: Kustomization\nresources: [../../base]\ncomponents: [../../components/{}]\n",
            name.to_string_lossy()
        );
        fs_err::write(overlay.join("kustomization.yaml"), text).expect("it is written");
        all.extend(rendered(&overlay));
    }
    all
}

/// Returns the pod of a document that has one.
fn pod(document: &Document) -> Option<&Value> {
    let spec = &document.value["spec"];
    match text_of(&document.value["kind"]) {
        "Job" | "Deployment" | "SandboxSet" => Some(&spec["template"]["spec"]),
        "SandboxTemplate" => Some(&spec["podTemplate"]["spec"]),
        "Pod" | "StatefulSet" | "DaemonSet" | "CronJob" | "ReplicaSet" => {
            panic!("{}: the tests do not know this kind", document.place)
        }
        _ => None,
    }
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"]
        .into_iter()
        .filter_map(|kind| pod[kind].as_array())
        .flatten()
}

/// Returns what is wrong with a pod by the rules of all of them.
fn faults(pod: &Value, is_sandbox: bool, may_ask_the_server: bool) -> Vec<String> {
    let mut faults = Vec::new();
    let mut require = |holds: bool, what: &str| {
        if !holds {
            faults.push(what.to_owned());
        }
    };
    let context = &pod["securityContext"];
    require(context["runAsNonRoot"] == true, "runAsNonRoot");
    require(
        context["runAsUser"].as_u64().is_some_and(|user| user > 0),
        "runAsUser",
    );
    require(
        context["seccompProfile"]["type"] == "RuntimeDefault",
        "seccompProfile",
    );
    require(
        pod["automountServiceAccountToken"] == may_ask_the_server,
        "automountServiceAccountToken",
    );
    for name in ["hostNetwork", "hostPID", "hostIPC"] {
        require(pod.get(name).is_none(), name);
    }
    require(
        !is_sandbox || pod["runtimeClassName"] == "gvisor",
        "runtimeClassName",
    );
    let volumes = pod["volumes"].as_array().into_iter().flatten();
    for volume in volumes {
        require(volume.get("hostPath").is_none(), "hostPath");
        let empty = &volume["emptyDir"];
        require(
            empty.is_null() || empty["sizeLimit"].is_string(),
            "sizeLimit",
        );
    }
    require(containers(pod).count() > 0, "containers");
    for container in containers(pod) {
        let context = &container["securityContext"];
        require(
            context["allowPrivilegeEscalation"] == false,
            "allowPrivilegeEscalation",
        );
        require(
            context["readOnlyRootFilesystem"] == true,
            "readOnlyRootFilesystem",
        );
        require(
            context["capabilities"]["drop"] == serde_json::json!(["ALL"])
                && context["capabilities"].get("add").is_none(),
            "capabilities",
        );
        require(
            context.get("privileged").is_none_or(|it| it == false),
            "privileged",
        );
        for name in ["runAsUser", "runAsNonRoot", "seccompProfile"] {
            require(context.get(name).is_none(), name);
        }
        for which in ["requests", "limits"] {
            for resource in ["cpu", "memory", "ephemeral-storage"] {
                let found = &container["resources"][which][resource];
                require(found.is_string(), &format!("{which}.{resource}"));
            }
        }
    }
    faults
}

/// Whether an image is named by a version that stays what it is.
fn is_pinned(image: &str) -> bool {
    let last = image.rsplit('/').next().unwrap_or_default();
    match last.split_once(['@', ':']) {
        Some((_, version)) => !version.is_empty() && !version.starts_with("latest"),
        // Named by the base's kustomization.
        None => matches!(image, "wardian-cuda" | "wardian-cpu"),
    }
}

fn check_pods(documents: &[Document]) -> usize {
    let mut checked = 0;
    let may_ask: BTreeSet<&str> = (documents.iter())
        .filter(|document| document.value["kind"] == "RoleBinding")
        .filter_map(|binding| binding.value["subjects"].as_array())
        .flatten()
        .map(|subject| text_of(&subject["name"]))
        .collect();
    for document in documents {
        let Some(pod) = pod(document) else { continue };
        let namespace = text_of(&document.value["metadata"]["namespace"]);
        for container in containers(pod) {
            let image = text_of(&container["image"]);
            assert!(is_pinned(image), "{}: `{image}`", document.place);
        }
        if namespace == BUILDS {
            continue;
        }
        let is_sandbox = namespace == "wardian-sandboxes";
        let account = text_of(&pod["serviceAccountName"]);
        let asks = document.value["kind"] == "Job" && may_ask.contains(account);
        let faults = faults(pod, is_sandbox, asks);
        assert!(faults.is_empty(), "{}: {faults:?}", document.place);
        checked += 1;
    }
    checked
}

#[test]
fn every_pod_is_restricted() {
    // Files by themselves: the token is in a patch.
    let documents: Vec<Document> = (written().into_iter())
        .filter(|document| document.value["kind"] != "RoleBinding")
        .collect();
    assert!(check_pods(&documents) >= 5);
    for documents in all_rendered() {
        assert!(check_pods(&documents) >= 3);
    }
}

#[test]
fn what_is_not_restricted_is_told() {
    let documents = written();
    let sound = (documents.iter())
        .find(|document| document.value["kind"] == "SandboxSet")
        .and_then(pod)
        .expect("there is a pool");
    assert_eq!(faults(sound, true, false), Vec::<String>::new());
    let changes = [
        ("/securityContext/runAsNonRoot", Value::Bool(false)),
        ("/securityContext/seccompProfile/type", "Unconfined".into()),
        ("/automountServiceAccountToken", Value::Bool(true)),
        ("/runtimeClassName", "runc".into()),
        (
            "/containers/0/securityContext/allowPrivilegeEscalation",
            Value::Bool(true),
        ),
        (
            "/containers/0/securityContext/readOnlyRootFilesystem",
            Value::Bool(false),
        ),
        (
            "/containers/0/securityContext/capabilities/drop/0",
            "NET_RAW".into(),
        ),
        ("/containers/0/resources/limits/memory", Value::Null),
        ("/volumes/0/emptyDir/sizeLimit", Value::Null),
    ];
    for (pointer, value) in changes {
        let mut changed = sound.clone();
        *changed.pointer_mut(pointer).expect("it is there") = value;
        assert_eq!(faults(&changed, true, false).len(), 1, "{pointer}");
    }
    assert!(!is_pinned("moby/buildkit:latest") && !is_pinned("moby/buildkit"));
    assert!(
        is_pinned("registry.example.org:5000/a:1") && !is_pinned("registry.example.org:5000/a")
    );
}

#[test]
fn every_namespace_denies_by_default() {
    let check = |documents: &[Document]| {
        let mut denied = BTreeSet::new();
        for document in documents {
            let spec = &document.value["spec"];
            if document.value["kind"] == "NetworkPolicy"
                && spec["podSelector"] == serde_json::json!({})
                && spec["policyTypes"] == serde_json::json!(["Ingress", "Egress"])
                && spec.get("ingress").is_none()
                && spec.get("egress").is_none()
            {
                denied.insert(text_of(&document.value["metadata"]["namespace"]).to_owned());
            }
        }
        let namespaces = documents
            .iter()
            .filter(|document| document.value["kind"] == "Namespace");
        for namespace in namespaces {
            let name = text_of(&namespace.value["metadata"]["name"]);
            assert!(denied.contains(name), "{}", namespace.place);
            let labels = &namespace.value["metadata"]["labels"];
            let level = text_of(&labels["pod-security.kubernetes.io/enforce"]);
            assert!(
                level == "restricted" || name == BUILDS,
                "{}: {level}",
                namespace.place
            );
        }
        denied.len()
    };
    assert_eq!(check(&written()), 3);
    for documents in all_rendered() {
        assert!(check(&documents) >= 2);
    }
}

/// Returns each right of a role as (group, resource, verb).
fn rights(role: &Value) -> BTreeSet<(String, String, String)> {
    let mut rights = BTreeSet::new();
    let texts = |value: &Value| -> Vec<String> {
        let texts = value.as_array().expect("a list").iter();
        texts.map(|text| text_of(text).to_owned()).collect()
    };
    for rule in role["rules"].as_array().expect("there are rules") {
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for verb in texts(&rule["verbs"]) {
                    rights.insert((group.clone(), resource.clone(), verb));
                }
            }
        }
    }
    rights
}

/// Returns the table of rights of `docs/heavy-tier.md`, as [`rights`]: those of builds, or all others.
fn documented_rights(of_builds: bool) -> BTreeSet<(String, String, String)> {
    let page = fs_err::read_to_string(root().join("../../docs/heavy-tier.md")).expect("the page");
    let table = page
        .split("| API group | resources | verbs |")
        .nth(1)
        .expect("the table is there");
    let mut rights = BTreeSet::new();
    for line in table.lines().skip(2) {
        let Some(line) = line.strip_prefix("| ") else {
            break;
        };
        let cells: Vec<&str> = line.split(" | ").collect();
        let [group, resources, verbs] = cells[..] else {
            panic!("{line}")
        };
        if verbs.contains("only with `builds`") != of_builds {
            continue;
        }
        let group = group.trim_matches('`').replace('–', "");
        let verbs = verbs.trim_end_matches(" |").split([';', '(']).next();
        let verbs = verbs.map(str::trim);
        for resource in resources.split(", ") {
            for verb in verbs.expect("verbs").split(", ") {
                let resource = resource.trim_matches('`').to_owned();
                rights.insert((group.clone(), resource, verb.to_owned()));
            }
        }
    }
    rights
}

#[test]
fn rights_are_those_that_the_backends_ask_for_and_no_others() {
    let documents = written();
    let kinds: BTreeSet<&str> = (documents.iter())
        .map(|document| text_of(&document.value["kind"]))
        .collect();
    assert!(!kinds.contains("ClusterRole") && !kinds.contains("ClusterRoleBinding"));
    let documented = documented_rights(false);
    assert!(documented.len() > 30, "{documented:?}");
    for (component, groups) in [
        ("kruise", ["agents.kruise.io", "apps.kruise.io"]),
        (
            "agent-sandbox",
            ["extensions.agents.x-k8s.io", "agents.x-k8s.io"],
        ),
    ] {
        let path = root().join(format!("components/{component}/rights.yaml"));
        let text = fs_err::read_to_string(&path).expect("it is read");
        let found = rights(&parse(component, &text)[0].value);
        assert!(found.iter().all(|(group, resource, verb)| {
            [group, resource, verb].into_iter().all(|text| text != "*") && resource != "secrets"
        }));
        for verb in ["get", "create"] {
            let exec = (String::new(), "pods/exec".to_owned(), verb.to_owned());
            assert!(found.contains(&exec), "{component}: {verb}");
        }
        for group in groups {
            assert!(found.iter().any(|(found, ..)| found == group), "{group}");
        }
        let foreign = |group: &str| match component {
            "kruise" => group.ends_with("x-k8s.io"),
            _ => group.ends_with("kruise.io"),
        };
        let mut wanted: BTreeSet<_> = (documented.iter())
            .filter(|(group, ..)| !foreign(group))
            .cloned()
            .collect();
        // The group that ACK's documentation has for the same kinds.
        if component == "kruise" {
            let more: Vec<_> = (wanted.iter())
                .filter(|(group, ..)| group == "agents.kruise.io")
                .map(|(_, resource, verb)| {
                    ("apps.kruise.io".to_owned(), resource.clone(), verb.clone())
                })
                .collect();
            wanted.extend(more);
        }
        assert_eq!(found, wanted, "{component}");
    }
}

#[test]
fn rights_of_builds_are_those_that_they_ask_for_and_no_others() {
    let path = root().join("components/buildkit/rights.yaml");
    let text = fs_err::read_to_string(&path).expect("it is read");
    let found = rights(&parse("buildkit", &text)[0].value);
    assert!(found.iter().all(|(_, resource, _)| resource != "secrets"));
    assert_eq!(found, documented_rights(true));
    let file = root().join("components/buildkit/run.toml");
    let run = RunConfig::load::<&str>(Some(&file), &[]).expect("it is a run file");
    let builds = run.actor.image_build.expect("it asks for builds");
    let manifest = fs_err::read_to_string(root().join("components/buildkit/buildkit.yaml"));
    let manifest = manifest.expect("it is read");
    // The image that is there anyway, and the name that it goes by in the sandboxes' namespace.
    assert!(manifest.contains(&format!("image: {}", builds.client_image)));
    assert_eq!(builds.buildkit, "tcp://buildkit:1234");
}

/// Whether the program takes these arguments: `--help` behind them is reached only if they are known.
fn takes(arguments: &[String]) -> Result<(), String> {
    let output = Command::new(env!("CARGO_BIN_EXE_wardian"))
        .args(arguments)
        .arg("--help")
        .output()
        .expect("the binary starts");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Returns the arguments of each call of the program in a container.
fn calls(container: &Value) -> Vec<Vec<String>> {
    let list = |name: &str| -> Vec<String> {
        let words = container[name].as_array().into_iter().flatten();
        words.map(|word| text_of(word).to_owned()).collect()
    };
    let (command, args) = (list("command"), list("args"));
    match command.first().map(String::as_str) {
        None => vec![args],
        Some("wardian") => vec![command[1..].to_vec()],
        Some(_) => (args.iter())
            .flat_map(|script| script.split("wardian ").skip(1))
            .map(|call| {
                let call = call.split([';', '\n']).next().unwrap_or_default();
                let words = call.split_whitespace();
                words
                    .map(|word| word.trim_matches('"').to_owned())
                    .collect()
            })
            .collect(),
    }
}

#[test]
fn what_containers_are_told_is_known() {
    let mut documents = written();
    let template = root().join("components/substrate/actor-template.yaml");
    let text = fs_err::read_to_string(template).expect("it is read");
    let actor = parse("actor", &text).remove(0);
    let mut known = BTreeSet::new();
    let mut pods: Vec<Value> = documents
        .drain(..)
        .filter_map(|it| pod(&it).cloned())
        .collect();
    pods.push(actor.value);
    for pod in &pods {
        for container in containers(pod) {
            if text_of(&container["image"]).contains("buildkit") {
                continue;
            }
            for call in calls(container) {
                takes(&call).unwrap_or_else(|error| panic!("{call:?}: {error}"));
                known.insert(call[0].clone());
            }
        }
    }
    assert_eq!(Vec::from_iter(&known), ["proxy", "serve", "train"]);
    let wrong = ["serve", "--env=coding_env", "--max-session=1"];
    takes(&wrong.map(str::to_owned)).expect_err("this one is not known");
}

#[test]
fn the_job_goes_on_after_a_stop_and_fails_for_what_stays_wrong() {
    let documents = written();
    let job = (documents.iter())
        .find(|document| document.value["kind"] == "Job")
        .expect("there is a job");
    let spec = &job.value["spec"];
    let rules = spec["podFailurePolicy"]["rules"].as_array().expect("rules");
    let by_code: BTreeMap<u64, &str> = (rules.iter())
        .flat_map(|rule| {
            let codes = rule["onExitCodes"]["values"].as_array();
            let action = text_of(&rule["action"]);
            codes
                .into_iter()
                .flatten()
                .map(move |code| (code.as_u64().expect("a number"), action))
        })
        .collect();
    assert_eq!(by_code, BTreeMap::from([(2, "FailJob"), (75, "Ignore")]));
    assert!(rules.iter().any(|rule| {
        rule["action"] == "Ignore" && rule["onPodConditions"][0]["type"] == "DisruptionTarget"
    }));
    let pod = pod(job).expect("it has a pod");
    assert_eq!(pod["restartPolicy"], "Never");
    assert!(pod["terminationGracePeriodSeconds"].as_u64() >= Some(120));
    // What the program says of itself.
    let page = fs_err::read_to_string(root().join("../../docs/training.md")).expect("the page");
    assert!(page.contains("75 stopped and saved") && page.contains("2 usage or input"));
}

#[test]
fn run_files_and_what_they_name_are_known() {
    let found = files(&root(), ".toml");
    assert!(found.len() >= 5);
    for file in found {
        let text = fs_err::read_to_string(&file).expect("it is read");
        let config = RunConfig::from_toml::<&str>(&text, &[]);
        let config = config.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert!(config.trainer.save_every > 0, "{}", file.display());
        let component = file.parent().and_then(Path::file_name).expect("a folder");
        match component.to_str().expect("UTF-8") {
            name @ ("kruise" | "agent-sandbox") => {
                assert_eq!(config.actor.backend.as_str(), name);
                let namespace = config.actor.kubernetes.namespace.as_deref();
                assert_eq!(namespace, Some("wardian-sandboxes"));
            }
            "several-gpus" => {
                let path = root().join("components/several-gpus/patch-job.yaml");
                let text = fs_err::read_to_string(path).expect("it is read");
                let patch = parse("patch", &text).remove(0).value;
                let most = u64::try_from(config.trainer.max_processes).expect("a number");
                assert_eq!(patch["spec"]["completions"].as_u64(), Some(most));
                assert_eq!(patch["spec"]["parallelism"].as_u64(), Some(most));
            }
            _ => {}
        }
    }
}

#[test]
fn probes_ask_routes_that_there_are() {
    let source = |path: &str| {
        let path = root().join("../../src").join(path);
        fs_err::read_to_string(path).expect("the source is there")
    };
    let (environment, proxy) = (source("openenv/mod.rs"), source("proxy/mod.rs"));
    let mut probes = 0;
    for document in written() {
        let Some(pod) = pod(&document) else { continue };
        for container in containers(pod) {
            let routes = match text_of(&container["args"][0]) {
                "proxy" => &proxy,
                _ => &environment,
            };
            for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
                let Some(path) = container[probe]["httpGet"]["path"].as_str() else {
                    continue;
                };
                let route = format!(".route(\"{path}\"");
                assert!(routes.contains(&route), "{}: {path}", document.place);
                probes += 1;
            }
        }
    }
    assert!(probes >= 7, "{probes}");
    for routes in [environment, proxy] {
        assert!(
            routes.contains(".route(\"/metrics\""),
            "for ServiceMonitors"
        );
    }
}
