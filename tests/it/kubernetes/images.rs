//! Images that are built: the job's own script runs, over a `buildctl` that pushes to a registry of ours.
//! `BuildKit` itself is not here.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wardian::actor::image::{ImageReference, Recipe, Registry as Client, RegistryOptions};
use wardian::actor::kubernetes::{BuildOptions, Controller as Family, KubernetesBackend};
use wardian::actor::{Entry, FileTree, RootFs};

use super::server::Cluster;
use super::store::{CONFIG_MAP, JOB, POD};
use super::{Scene, kruise};

/// A registry that gives tokens and asks for them.
pub(super) struct Registry {
    pub(super) address: SocketAddr,
    state: Arc<Asked>,
    runtime: Option<Runtime>,
}

struct Asked {
    cluster: Arc<Cluster>,
    port: Mutex<u16>,
    requests: Mutex<Vec<String>>,
}

impl Registry {
    pub(super) fn start(scene: &Scene) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0)))
            .unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Asked {
            cluster: Arc::clone(&scene.cluster),
            port: Mutex::new(address.port()),
            requests: Mutex::default(),
        });
        let router = axum::Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&state));
        runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self {
            address,
            state,
            runtime: Some(runtime),
        }
    }

    fn requests(&self) -> Vec<String> {
        self.state.requests.lock().unwrap().clone()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.runtime
            .take()
            .unwrap()
            .shutdown_timeout(Duration::from_secs(5));
    }
}

async fn answer(State(state): State<Arc<Asked>>, request: Request) -> Response {
    let shown = request.headers().get(header::AUTHORIZATION);
    let shown = shown
        .map(|value| value.to_str().unwrap().to_owned())
        .unwrap_or_default();
    let path = request.uri().path().to_owned();
    state
        .requests
        .lock()
        .unwrap()
        .push(format!("{} {path} {shown}", request.method()));
    if path == "/token" {
        return axum::Json(json!({ "token": "the-token" })).into_response();
    }
    if path.contains("/broken/") {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    if shown != "Bearer the-token" {
        let port = *state.port.lock().unwrap();
        let realm =
            format!("Bearer realm=\"http://127.0.0.1:{port}/token\",service=\"r\",scope=\"pull\"");
        return (
            StatusCode::UNAUTHORIZED,
            [(header::WWW_AUTHENTICATE, realm)],
        )
            .into_response();
    }
    let name = path.trim_start_matches("/v2/").replace("/manifests/", ":");
    match state.cluster.images.lock().unwrap().contains(&name) {
        true => StatusCode::OK.into_response(),
        false => StatusCode::NOT_FOUND.into_response(),
    }
}

/// What stands in for `buildctl`: it looks at what it is told and says what it would push.
const BUILDCTL: &str = r#"#!/bin/sh
echo "$@" > "$TOLD"
[ "$1 $2 $3" = "--addr tcp://buildkit:1234 build" ] || exit 2
for argument; do
    last=$argument
    case $argument in dockerfile=*) folder=${argument#*=};; filename=*) file=${argument#*=};; esac
done
[ -x "$folder/run.sh" ] || { echo "run.sh is not there" >&2; exit 3; }
if grep -q FAIL "$folder/$file"; then echo "step 3: there is no such package" >&2; exit 1; fi
case $last in type=image,name=*,push=true*) name=${last#*name=}; echo "${name%%,*}" > "$PUSHED";; *) exit 4;; esac
"#;

/// Runs the jobs that were made, as the kubelet and the job controller would.
pub(super) fn run_jobs(cluster: &Cluster) {
    let jobs = cluster.store().list(&JOB);
    for job in jobs.iter().filter(|job| job["status"].is_null()) {
        let name = job["metadata"]["name"].as_str().unwrap();
        let template = &job["spec"]["template"];
        let problems = super::controller::violations(&template["spec"]);
        assert!(problems.is_empty(), "{problems:?}");
        let pod = json!({
            "metadata": {
                "name": format!("{name}-x"), "labels": template["metadata"]["labels"],
                "ownerReferences": [{
                    "apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"],
                }],
            },
            "spec": template["spec"],
            "status": { "phase": "Succeeded" },
        });
        cluster.store().create(&POD, pod).unwrap();
        let given = cluster.store().get(&CONFIG_MAP, name).unwrap().clone();
        let (pushed, log) = run_job(&template["spec"]["containers"][0]["command"], &given);
        cluster
            .logs
            .lock()
            .unwrap()
            .insert(format!("{name}-x"), log);
        let status = match &pushed {
            Some(_) => json!({ "succeeded": 1 }),
            None => json!({ "failed": 3, "conditions": [{
                "type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too often",
            }] }),
        };
        if let Some(image) = pushed {
            let name = image.split_once('/').unwrap().1.to_owned();
            cluster.images.lock().unwrap().insert(name);
        }
        cluster
            .store()
            .update(&JOB, name, |job| job["status"] = status);
    }
}

/// Runs a job's command; returns the image that it has pushed, and its log.
fn run_job(command: &Value, given: &Value) -> (Option<String>, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for name in ["bin", "context", "given"] {
        fs_err::create_dir(path(name)).unwrap();
    }
    fs_err::write(path("bin/buildctl"), BUILDCTL).unwrap();
    fs_err::set_permissions(path("bin/buildctl"), PermissionsExt::from_mode(0o755)).unwrap();
    let archive = given["binaryData"]["context.tar"].clone();
    let archive: k8s_openapi::ByteString = serde_json::from_value(archive).unwrap();
    fs_err::write(path("given/context.tar"), archive.0).unwrap();
    let words = command
        .as_array()
        .unwrap()
        .iter()
        .map(|word| match word.as_str().unwrap() {
            "/context" => path("context").to_string_lossy().into_owned(),
            "/given" => path("given").to_string_lossy().into_owned(),
            word => word.to_owned(),
        });
    let words: Vec<String> = words.collect();
    let variable = std::env::var("PATH").unwrap();
    let output = std::process::Command::new(&words[0])
        .args(&words[1..])
        .env("PATH", format!("{}:{variable}", path("bin").display()))
        .env("TOLD", path("told"))
        .env("PUSHED", path("pushed"))
        .output()
        .unwrap();
    let pushed = fs_err::read_to_string(path("pushed")).ok();
    let log = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.success(), pushed.is_some(), "{log}");
    (pushed.map(|name| name.trim().to_owned()), log)
}

fn recipe(dockerfile: &str) -> Recipe {
    let mut context = FileTree::of_file("sub/Dockerfile", dockerfile).unwrap();
    let script = Entry::File {
        bytes: b"#!/bin/sh\n".to_vec(),
        executable: true,
    };
    context.insert("run.sh", script).unwrap();
    Recipe {
        context,
        dockerfile: "sub/Dockerfile".into(),
    }
}

fn registry_options() -> RegistryOptions {
    RegistryOptions {
        plain_http: true,
        ..RegistryOptions::default()
    }
}

/// Returns a cluster whose backend builds images.
fn building() -> (Scene, Registry) {
    let mut scene = Scene::bare();
    let registry = Registry::start(&scene);
    let mut options = scene.options(Family::kruise());
    options.builds = Some(BuildOptions {
        registry: registry_options(),
        timeout: Duration::from_secs(60),
        ..BuildOptions::new(
            format!("{}/tasks", registry.address),
            "registry.example.org/buildctl:1",
        )
    });
    scene.backend = Some(KubernetesBackend::open(options).unwrap());
    (scene, registry)
}

pub(super) fn jobs_made(scene: &Scene) -> usize {
    let requests = scene.cluster.requests.lock().unwrap();
    requests
        .iter()
        .filter(|request| request.starts_with("PATCH") && request.contains("/jobs/"))
        .count()
}

#[test]
fn an_image_is_built_once_for_all_who_ask() {
    let (scene, registry) = building();
    let image = format!("{}/swe/a:1", registry.address);
    let recipe = recipe("FROM scratch\n");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| scene.backend().ensure_image(&image, &recipe).unwrap());
        }
    });
    assert_eq!(jobs_made(&scene), 1);
    // Whoever asks later, in this run or another one, has it without a build.
    let other = format!("{}/swe/b:1", registry.address);
    scene
        .cluster
        .images
        .lock()
        .unwrap()
        .insert("swe/b:1".to_owned());
    for image in [&image, &other] {
        scene.backend().ensure_image(image, &recipe).unwrap();
    }
    assert_eq!(jobs_made(&scene), 1);
    let store = scene.cluster.store();
    assert!(store.list(&JOB).is_empty() && store.list(&CONFIG_MAP).is_empty());
    drop(store);
    drop(registry);
    scene.close();
}

#[test]
fn a_build_that_fails_is_our_failure_with_the_end_of_its_log() {
    let (scene, registry) = building();
    let image = format!("{}/swe/a:1", registry.address);
    let error = scene
        .backend()
        .ensure_image(&image, &recipe("FAIL\n"))
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("BackoffLimitExceeded"), "{text}");
    assert!(text.contains("step 3: there is no such package"), "{text}");
    assert!(!error.is_guests_doing());
    // It is tried again when somebody asks again.
    scene
        .backend()
        .ensure_image(&image, &recipe("FROM scratch\n"))
        .unwrap();
    assert_eq!(jobs_made(&scene), 2);
    drop(registry);
    scene.close();
}

#[test]
fn what_cannot_be_built_is_refused_before() {
    let (scene, registry) = building();
    let image = format!("{}/swe/a:1", registry.address);
    let large = Recipe {
        context: FileTree::of_file("sub/Dockerfile", vec![b'x'; 1 << 20]).unwrap(),
        dockerfile: "sub/Dockerfile".into(),
    };
    let error = scene.backend().ensure_image(&image, &large).unwrap_err();
    assert!(
        error.to_string().contains("have its build fetch"),
        "{error}"
    );
    let error = scene
        .backend()
        .ensure_image("no-registry", &large)
        .unwrap_err();
    assert!(error.to_string().contains("names no registry"), "{error}");
    let broken = format!("{}/broken/a:1", registry.address);
    let error = scene.backend().ensure_image(&broken, &large).unwrap_err();
    assert!(error.to_string().contains("502"), "{error}");
    assert_eq!(jobs_made(&scene), 0);
    drop(registry);
    scene.close();
    let scene = kruise();
    let error = scene.backend().ensure_image(&image, &large).unwrap_err();
    assert!(error.to_string().contains("cannot build images"), "{error}");
    scene.close();
}

/// What a run asks for: tasks' own images where the registry has them, or they can be built.
#[test]
fn images_that_are_named_are_looked_for_in_the_own_registry_alone() {
    let (scene, registry) = building();
    let builder = scene.backend().builder().unwrap();
    let recipe = recipe("FROM scratch\nWORKDIR /app\n");
    let named = |name: &str| format!("{}/{name}", registry.address);
    let root = |image: &str| RootFs::Image(image.to_owned());
    // By its content, and by a name that a task has given.
    let built = builder.build(&recipe).unwrap();
    let expected = named(&format!("tasks:{}", recipe.tag()));
    assert_eq!(built.root, root(&expected));
    assert_eq!(built.workdir.unwrap(), std::path::Path::new("/app"));
    let image = named("team/task:1");
    let built = builder.image(&image, Some(&recipe)).unwrap();
    assert_eq!(built.root, root(&image));
    assert_eq!(jobs_made(&scene), 2);
    let error = builder.image(&named("team/other:1"), None).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("team/other:1") && text.contains("`actor.image`"),
        "{text}"
    );
    // Others answer to whom they like.
    let asked = registry.requests().len();
    for image in ["python:3.12", "other.example.org/a:1"] {
        let built = builder.image(image, Some(&recipe)).unwrap();
        assert_eq!(built.root, root(image));
    }
    assert_eq!((registry.requests().len(), jobs_made(&scene)), (asked, 2));
    drop((builder, registry));
    scene.close();
}

#[test]
fn passwords_go_to_the_registry_alone() {
    let scene = Scene::bare();
    let (own, other) = (Registry::start(&scene), Registry::start(&scene));
    let client = Client::new(RegistryOptions {
        credentials: Some(("user".to_owned(), "secret".to_owned())),
        ..registry_options()
    });
    let image: ImageReference = format!("{}/a:1", own.address).parse().unwrap();
    assert!(!client.has(&image).unwrap());
    let basic = "Basic dXNlcjpzZWNyZXQ=";
    assert!(
        own.requests().contains(&format!("GET /token {basic}")),
        "{:?}",
        own.requests()
    );
    // Its tokens are another's to give.
    *own.state.port.lock().unwrap() = other.address.port();
    scene
        .cluster
        .images
        .lock()
        .unwrap()
        .insert("a:1".to_owned());
    assert!(client.has(&image).unwrap());
    assert_eq!(other.requests(), ["GET /token "]);
    drop((own, other));
    scene.close();
}
