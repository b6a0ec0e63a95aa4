//! `wardian train` with its actors in a cluster.

use std::path::Path;

use super::images::{Registry, jobs_made};
use super::kubelet::IMAGE;
use super::{NAMESPACE, Scene};
use crate::heavy::{BuiltTask, check_failed_apart, episodes, solve_by_script, told, train_on};

fn trains_in(backend: &str) {
    let scene = Scene::bare();
    let folder = tempfile::tempdir().unwrap();
    solve_by_script(folder.path(), 1, |repositories| {
        let repository = repositories.join("a__b-0/testbed");
        let mut content = scene.cluster.kubelet.content.lock().unwrap();
        content.push((repository, "/base".into()));
        let url = scene.server.url();
        format!(
            "backend = '{backend}'\nimage = '{IMAGE}'\n\
             kubernetes = {{ api_server = '{url}', namespace = '{NAMESPACE}', ready_timeout = '5m' }}"
        )
    });
    let posts = scene.cluster.requests.lock().unwrap();
    let execs = posts.iter().filter(|request| request.contains("/exec"));
    assert!(execs.count() > 8, "the tasks ran elsewhere");
    drop(posts);
    scene.close();
}

#[test]
fn a_run_solves_its_tasks_in_sandboxes_of_openkruise() {
    trains_in("kruise");
}

#[test]
fn a_run_solves_its_tasks_in_sandboxes_of_sig_agent_sandbox() {
    trains_in("agent-sandbox");
}

/// Returns what a run is told of the cluster and the registry.
fn builds_in(scene: &Scene, registry: &Registry, backend: &str) -> String {
    format!(
        "backend = '{backend}'\n\
         kubernetes = {{ api_server = '{}', namespace = '{NAMESPACE}', ready_timeout = '5m' }}\n\
         image_build = {{ registry = '{}/tasks', plain_http = true, timeout = '5m' }}",
        scene.server.url(),
        registry.address,
    )
}

/// What the stand-in of `buildctl` wants to see.
fn with_script(context: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let script = context.join("run.sh");
    fs_err::write(&script, "#!/bin/sh\n").unwrap();
    fs_err::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
}

const COMMAND: &str = "echo \"$(pwd) hello\" > answer.txt";

/// Eight rollouts of two tasks with the same words: one job, in the first run alone.
#[test]
fn what_tasks_start_from_is_built_once_for_all_runs() {
    let scene = Scene::bare();
    let registry = Registry::start(&scene);
    let folder = tempfile::tempdir().unwrap();
    for (run, backend) in [("first", "kruise"), ("second", "agent-sandbox")] {
        let tasks = ["one", "two"].map(|name| BuiltTask {
            name,
            dockerfile: "FROM scratch\nWORKDIR /app\n",
            context: &with_script,
        });
        let actor = builds_in(&scene, &registry, backend);
        let output = train_on(folder.path(), run, &tasks, COMMAND, &actor);
        assert!(output.status.success(), "{}", told(&output));
        let rows = episodes(&folder.path().join(run), 1);
        assert_eq!(rows.len(), 8);
        for row in &rows {
            assert_eq!(row.reward, Some(1.0), "{row:#?}");
        }
        assert_eq!(jobs_made(&scene), 1, "{run}");
    }
    drop(registry);
    scene.close();
}

#[test]
fn a_build_that_fails_costs_only_the_episodes_of_its_task() {
    let scene = Scene::bare();
    let registry = Registry::start(&scene);
    let folder = tempfile::tempdir().unwrap();
    let tasks = [("bad", "FAIL\n"), ("good", "FROM scratch\nWORKDIR /app\n")];
    let tasks = tasks.map(|(name, dockerfile)| BuiltTask {
        name,
        dockerfile,
        context: &with_script,
    });
    let actor = builds_in(&scene, &registry, "kruise");
    let output = train_on(folder.path(), "run", &tasks, COMMAND, &actor);
    assert!(output.status.success(), "{}", told(&output));
    let run = folder.path().join("run");
    check_failed_apart(&run, &output, "step 3: there is no such package");
    drop(registry);
    scene.close();
}

#[test]
fn a_task_that_has_to_be_built_names_the_key() {
    let scene = Scene::bare();
    let registry = Registry::start(&scene);
    let folder = tempfile::tempdir().unwrap();
    let actor = builds_in(&scene, &registry, "kruise");
    let without = actor.split("image_build").next().unwrap();
    let task = BuiltTask {
        name: "one",
        dockerfile: "FROM scratch\n",
        context: &with_script,
    };
    let output = train_on(folder.path(), "run", &[task], COMMAND, without);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        told(&output).contains("`actor.image_build`"),
        "{}",
        told(&output)
    );
    drop(registry);
    scene.close();
}
