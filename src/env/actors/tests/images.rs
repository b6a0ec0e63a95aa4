//! Episodes whose images have to be built.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::actor::ActorError;
use crate::actor::image::{Built, Recipe};
use crate::env::EnvError;

/// A task that is built, and whose verifier is built of its tests.
const TASK: [(&str, &str); 6] = [
    (
        "task.toml",
        "[verifier]\nenvironment_mode = \"separate\"\n[agent]\ntimeout_sec = 1\n",
    ),
    ("instruction.md", "Do it."),
    ("environment/Dockerfile", "FROM agent\n"),
    ("environment/data", "1"),
    ("tests/Dockerfile", "FROM verifier\n"),
    ("tests/test.sh", "judge"),
];

/// Notes what is asked of it.
#[derive(Debug, Default)]
struct Noted {
    /// Files that say how, and images that are named.
    asked: Mutex<Vec<String>>,
    fails: AtomicBool,
    ends: AtomicBool,
}

impl Noted {
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    fn note(&self, what: String) -> Result<Built, ActorError> {
        self.asked.lock().unwrap().push(what.clone());
        match self.fails.load(Ordering::SeqCst) {
            true => Err(ActorError::Backend {
                activity: "building".to_owned(),
                message: "no such package".to_owned(),
            }),
            false => Ok(Built {
                root: RootFs::Folder(PathBuf::from(what)),
                workdir: Some("/app".into()),
                env: BTreeMap::from([("FROM".to_owned(), "image".to_owned())]),
            }),
        }
    }
}

impl ImageBuilder for Noted {
    fn max_context(&self) -> u64 {
        100
    }

    fn build(&self, recipe: &Recipe) -> Result<Built, ActorError> {
        let text = recipe.context.file(&recipe.dockerfile).unwrap();
        self.note(String::from_utf8(text.to_vec()).unwrap().trim().to_owned())
    }

    fn image(&self, image: &str, recipe: Option<&Recipe>) -> Result<Built, ActorError> {
        let how = recipe.map_or("none", |_| "a recipe");
        self.note(format!("{image}, {how}"))
    }

    fn shut_down(&self) {
        self.ends.store(true, Ordering::SeqCst);
    }
}

fn judges() -> Arc<Scripted> {
    Scripted::new(|inside, _, command| {
        if is_verifier(command) {
            inside.write(REWARD, "1");
        }
        Ok(String::new())
    })
}

fn building(backend: &Arc<Scripted>, builder: &Arc<Noted>) -> Arc<Workplace> {
    let builder = Arc::clone(builder);
    place_with(backend, None, Some(builder), None)
}

#[test]
fn images_are_built_before_an_actor_starts_and_once_for_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &TASK);
    let (backend, builder) = (judges(), Arc::new(Noted::default()));
    let place = building(&backend, &builder);
    let repository = task.repository.clone().unwrap();
    place.check(&repository).unwrap();
    assert_eq!(
        builder.asked(),
        [""; 0],
        "nothing is built to see whether it can be"
    );
    for _ in 0..2 {
        let result = submit(&mut environment(&place, &task));
        assert_eq!(result.reward, Some(1.0), "{result:?}");
    }
    // The verifier's, too, before the policy has worked in vain.
    assert_eq!(builder.asked(), ["FROM agent", "FROM verifier"]);
    let spec = place.spec(&repository).unwrap();
    assert_eq!(spec.root, RootFs::Folder("FROM agent".into()));
    assert_eq!(spec.workdir, PathBuf::from("/app"));
    assert_eq!(spec.env["FROM"], "image");
    place.close();
    assert!(builder.ends.load(Ordering::SeqCst));
}

/// The task's own words come before those of its image.
#[test]
fn a_task_says_more_than_its_image() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        "[environment]\ndocker_image = \"a:1\"\nworkdir = \"/own\"\nenv = { FROM = \"task\" }\n";
    let task = task(
        folder.path(),
        &[&TASK[1..4], &[TASK[5], ("task.toml", config)]].concat(),
    );
    let (backend, builder) = (judges(), Arc::new(Noted::default()));
    let place = building(&backend, &builder);
    let spec = place.spec(task.repository.as_ref().unwrap()).unwrap();
    assert_eq!(builder.asked(), ["a:1, a recipe"]);
    assert_eq!(spec.workdir, PathBuf::from("/own"));
    assert_eq!(spec.env["FROM"], "task");
}

#[test]
fn a_build_that_fails_is_never_the_policys_doing() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &TASK);
    let (backend, builder) = (judges(), Arc::new(Noted::default()));
    let place = building(&backend, &builder);
    builder.fails.store(true, Ordering::SeqCst);
    let turn = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new("bash", json!({ "command": "true" })))],
        ..ParsedTurn::default()
    };
    let error = environment(&place, &task).step(&turn).unwrap_err();
    let EnvError::Actor { source, .. } = &error else {
        panic!("{error:?}");
    };
    assert!(!source.is_guests_doing(), "{source}");
    assert!(source.to_string().contains("no such package"), "{source}");
    let mut cut_off = environment(&place, &task);
    let result = cut_off.close(None);
    assert_eq!(result.reward, None);
    assert_eq!(result.status, Some(EpisodeStatus::InfraError));
    // Nobody has taken room for it, and it is tried again.
    builder.fails.store(false, Ordering::SeqCst);
    let result = submit(&mut environment(&place, &task));
    assert_eq!(result.reward, Some(1.0), "{result:?}");
    assert_eq!(backend.live(), 0);
}

/// However long a build takes, the agent's second is its own.
#[test]
fn no_time_of_the_agents_passes_during_a_build() {
    #[derive(Debug)]
    struct Slow(Noted);
    impl ImageBuilder for Slow {
        fn max_context(&self) -> u64 {
            self.0.max_context()
        }
        fn build(&self, recipe: &Recipe) -> Result<Built, ActorError> {
            std::thread::sleep(Duration::from_millis(700));
            self.0.build(recipe)
        }
        fn image(&self, image: &str, recipe: Option<&Recipe>) -> Result<Built, ActorError> {
            self.0.image(image, recipe)
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), &TASK);
    let backend = Scripted::new(|inside, _, command| {
        if is_verifier(command) {
            inside.write(REWARD, "1");
        }
        Ok("still there".to_owned())
    });
    let builder: Arc<dyn ImageBuilder> = Arc::new(Slow(Noted::default()));
    let place = place_with(&backend, None, Some(builder), None);
    let mut environment = environment(&place, &task);
    let turn = ParsedTurn {
        tool_calls: vec![Ok(ToolCall::new("bash", json!({ "command": "true" })))],
        ..ParsedTurn::default()
    };
    // Two builds take longer than the second that the agent has.
    let result = environment.step(&turn).unwrap();
    assert!(!result.done, "{result:?}");
    let result = environment.step(&turn).unwrap();
    let told = &result.observation.last().unwrap().content;
    assert!(!result.done && told.contains("still there"), "{result:?}");
    assert!(environment.stats().start_seconds >= 1.4);
}

#[test]
fn what_cannot_be_had_is_told_with_what_helps() {
    let folder = |files: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        let task = task(folder.path(), files);
        (folder, task.repository.unwrap())
    };
    let backend = judges();
    let (_kept, built) = folder(&TASK);
    let error = place_with(&backend, None, None, None)
        .check(&built)
        .unwrap_err();
    assert!(
        error.to_string().contains("give `actor.image_build`"),
        "{error}"
    );
    // A folder `environment` without what it is for.
    let (_kept, nothing) = folder(&[TASK[0], TASK[1], TASK[3], TASK[5]]);
    let builder = Arc::new(Noted::default());
    let error = building(&backend, &builder).check(&nothing).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("has no `environment/Dockerfile`"),
        "{error}"
    );
    let large = "x".repeat(200);
    let (_kept, large) = folder(&[&TASK[..], &[("environment/large", large.as_str())]].concat());
    let error = building(&backend, &builder).check(&large).unwrap_err();
    assert!(error.to_string().contains("more than 100 bytes"), "{error}");
    // What stands in for all images needs no recipe, unless a verifier brings its tests in its image.
    let plain = [TASK[0], TASK[1], TASK[3], TASK[5]];
    let (_kept, plain) = folder(&plain);
    place(&backend).check(&plain).unwrap();
    let error = place(&backend).check(&built).unwrap_err();
    assert!(error.to_string().contains("cannot stand in"), "{error}");
    assert_eq!(builder.asked(), [""; 0]);
}
