//! Tasks whose images are built on this machine, by `buildah` itself. The tests say so and skip where it is not
//! installed.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::json;
use wardian::actor::image::{Buildah, BuildahOptions, ImageBuilder as _, Recipe};
use wardian::actor::{ActorError, Entry, FileTree, RootFs};
use wardian::trajectory::Status;

use super::runs::{AGENT, assert_clean, episodes, settings, told, wardian};
use super::{folders_in, processes_naming, write};

/// What the tests of a task find out: whether the agent was where the image says, with what it says.
const TEST: &str = "#!/bin/sh\n[ \"$(cat /app/answer.txt)\" = \"/app hello\" ] && reward=1 || reward=0\n\
                    echo $reward > /logs/verifier/reward.txt\n";

/// A task that names no image, and what is beside its `Dockerfile`.
pub(crate) struct BuiltTask<'a> {
    pub(crate) name: &'a str,
    pub(crate) dockerfile: &'a str,
    pub(crate) context: &'a dyn Fn(&Path),
}

/// Trains for a step of 8 episodes on tasks that are to be built, with an agent that does `command`.
pub(crate) fn train_on(
    folder: &Path,
    run: &str,
    tasks: &[BuiltTask<'_>],
    command: &str,
    actor: &str,
) -> Output {
    let arguments = prepare(folder, run, tasks, command, actor);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    wardian(folder, &arguments).output().expect("it starts")
}

/// Writes tasks and a run file, and returns the arguments of a run on them.
fn prepare(
    folder: &Path,
    run: &str,
    tasks: &[BuiltTask<'_>],
    command: &str,
    actor: &str,
) -> Vec<String> {
    let (place, measured) = (folder.join("built-tasks"), folder.join("measured"));
    let mut commands = BTreeMap::new();
    // What is measured on is not learned from; nothing is, here.
    let last = tasks.last().expect("there are tasks");
    let other = BuiltTask {
        name: "measured",
        ..*last
    };
    let placed = tasks.iter().map(|task| (task, &place));
    for (task, place) in placed.chain([(&other, &measured)]) {
        let task_folder = place.join(task.name);
        let config =
            "schema_version = \"1.4\"\n[agent]\ntimeout_sec = 900\n[verifier]\ntimeout_sec = 900\n";
        write(&task_folder.join("task.toml"), config);
        write(&task_folder.join("instruction.md"), "Say where you are.");
        write(&task_folder.join("tests/test.sh"), TEST);
        write(&task_folder.join("environment/Dockerfile"), task.dockerfile);
        (task.context)(&task_folder.join("environment"));
        commands.insert(task.name, [command]);
    }
    let agent = folder.join("agent.py");
    fs_err::write(&agent, AGENT).expect("written");
    let more = format!(
        "[rollout.agent]
        command = ['python3', '{}']
        concurrency = 8
        env = {{ COMMANDS = '''{}''', PYTHONDONTWRITEBYTECODE = '1' }}
        ",
        agent.display(),
        json!(commands),
    );
    let config = settings(&place.display().to_string(), &more)
        .replace("root = 'host'", actor)
        .replace("'10s'", "'2m'")
        .replace("steps = 2", "steps = 1")
        .replace("        every = 1", "        every = 0")
        .replace(
            "[rollout]\n",
            &format!("task.eval_path = '{}'\n[rollout]\n", measured.display()),
        );
    let file = folder.join(format!("{run}.toml"));
    fs_err::write(&file, config).expect("written");
    let (file, out) = (file.display(), folder.join(run));
    [
        "train",
        "--config",
        &file.to_string(),
        "--out",
        &out.display().to_string(),
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Whether `buildah` is here.
#[expect(
    clippy::print_stdout,
    reason = "what is skipped is told with the test's output"
)]
fn has_buildah() -> bool {
    let output = Command::new("buildah").arg("--version").output();
    let is_there = output.is_ok_and(|output| output.status.success());
    if !is_there {
        println!(
            "skipped: there is no `buildah`; hint: apt-get install --no-install-recommends buildah"
        );
    }
    is_there
}

/// Writes a small root filesystem of this machine's programs to `FOLDER/rootfs`.
fn root_filesystem(folder: &Path) {
    let programs = [
        "sh", "cat", "chmod", "chown", "cp", "id", "ls", "mkdir", "mv", "rm", "sleep", "tar",
        "touch", "true",
    ];
    let copy = |from: &Path, to: &Path| {
        fs_err::create_dir_all(to.parent().expect("it is in a folder")).expect("made");
        fs_err::copy(from, to).expect("copied");
    };
    let root = folder.join("rootfs");
    for program in programs {
        let found = fs_err::canonicalize(Path::new("/usr/bin").join(program)).expect("it is there");
        copy(&found, &root.join("usr/bin").join(program));
        let libraries = Command::new("ldd").arg(&found).output().expect("ldd");
        let libraries = String::from_utf8(libraries.stdout).expect("UTF-8");
        let words = libraries.split_whitespace();
        for library in words.filter(|word| word.starts_with("/lib")) {
            copy(Path::new(library), &root.join("usr").join(&library[1..]));
        }
    }
    for link in ["bin", "lib", "lib64"] {
        let target = Path::new("usr").join(link);
        let made = std::os::unix::fs::symlink(target, root.join(link));
        // A second run finds its tasks.
        assert!(made.is_ok() || root.join(link).is_symlink());
    }
    write(&root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n");
}

const GOOD: &str = "FROM scratch\nCOPY rootfs/ /\nENV GREETING=hello\nWORKDIR /app\n\
                    RUN echo $GREETING > greeting\n";
const COMMAND: &str = "[ \"$GREETING\" = hello ] && echo \"$(pwd) $(cat greeting)\" > answer.txt";

fn actor(folder: &Path, backend: &str) -> String {
    let images = folder.join("images");
    format!(
        "backend = '{backend}'\nimage_build = {{ folder = '{}', network = false, timeout = '10m' }}",
        images.display()
    )
}

/// The root filesystems that are kept.
fn kept(images: &Path) -> Vec<PathBuf> {
    let is_kept = |path: &PathBuf| {
        let name = path.file_name().expect("it has one").to_string_lossy();
        name.starts_with("context-")
    };
    folders_in(images).into_iter().filter(is_kept).collect()
}

#[test]
fn a_run_builds_what_its_tasks_start_from_and_the_next_has_it() {
    if !has_buildah() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let images = folder.path().join("images");
    let train = |run: &str, backend: &str| {
        let tasks = ["one", "two"].map(|name| BuiltTask {
            name,
            dockerfile: GOOD,
            context: &root_filesystem,
        });
        let actor = actor(folder.path(), backend);
        let output = train_on(folder.path(), run, &tasks, COMMAND, &actor);
        assert!(output.status.success(), "{}", told(&output));
        let rows = episodes(&folder.path().join(run), 1);
        assert_eq!(rows.len(), 8);
        for row in &rows {
            assert_eq!(row.reward, Some(1.0), "{row:#?}");
            assert!(row.usage.start_seconds > 0.0);
        }
        assert_clean(folder.path());
    };
    train("first", "runsc");
    // Two tasks of the same words, and one image.
    let [image] = &kept(&images)[..] else {
        panic!("{:?}", kept(&images));
    };
    let made = || fs_err::metadata(image.join("config.json")).and_then(|file| file.modified());
    let first = made().expect("a time");
    assert!(!images.join("work").exists());
    train("second", "bwrap");
    assert_eq!(made().expect("a time"), first);
    assert_eq!(kept(&images).len(), 1);
}

/// One of two tasks cannot be built: its episodes have no reward, the others theirs, and the run goes on.
#[test]
fn a_build_that_fails_costs_only_the_episodes_of_its_task() {
    if !has_buildah() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let bad = format!("{GOOD}RUN echo there is no such package && exit 7\n");
    let tasks = [("bad", bad.as_str()), ("good", GOOD)].map(|(name, dockerfile)| BuiltTask {
        name,
        dockerfile,
        context: &root_filesystem,
    });
    let actor = actor(folder.path(), "runsc");
    let output = train_on(folder.path(), "run", &tasks, COMMAND, &actor);
    assert!(output.status.success(), "{}", told(&output));
    check_failed_apart(
        &folder.path().join("run"),
        &output,
        "there is no such package",
    );
    assert_eq!(kept(&folder.path().join("images")).len(), 1);
    assert_clean(folder.path());
}

/// Checks that the episodes of the task `bad` are nobody's doing, for the reason that was told, and those of `good`
/// solved.
pub(crate) fn check_failed_apart(run: &Path, output: &Output, why: &str) {
    let rows = episodes(run, 1);
    for row in &rows {
        match row.task_id.as_str() {
            "bad" => match &row.status {
                Status::Failed { reason } => {
                    assert!(row.reward.is_none() && reason.contains(why), "{reason}");
                }
                other => panic!("{other:?}"),
            },
            _ => assert_eq!(row.reward, Some(1.0), "{row:?}"),
        }
    }
    let of = |name: &str| rows.iter().filter(|row| row.task_id == name).count();
    assert_eq!((of("bad"), of("good")), (4, 4), "{}", told(output));
}

/// A builder with a folder of its own, without a network.
fn open(folder: &Path, timeout: Duration, max_size: u64) -> Buildah {
    let options = BuildahOptions {
        folder: folder.to_owned(),
        network: false,
        timeout,
        max_size,
    };
    Buildah::open(options).expect("it opens")
}

fn recipe(dockerfile: &str) -> Recipe {
    let folder = tempfile::tempdir().expect("a folder");
    root_filesystem(folder.path());
    write(&folder.path().join("Dockerfile"), dockerfile);
    Recipe::read(folder.path(), 256 << 20).expect("it reads")
}

const LONG: Duration = Duration::from_secs(600);

fn root_of(builder: &Buildah, recipe: &Recipe) -> PathBuf {
    match builder.build(recipe).expect("it is built").root {
        RootFs::Folder(folder) => folder,
        other => panic!("{other:?}"),
    }
}

#[test]
fn many_who_ask_have_one_build_without_a_network() {
    if !has_buildah() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let images = folder.path().join("images");
    let recipe = recipe(
        "FROM scratch\nCOPY rootfs/ /\n\
         RUN cat /proc/sys/kernel/random/uuid > /once && cat /proc/net/dev > /net\n",
    );
    let builders = [(); 2].map(|()| open(&images, LONG, 1 << 30));
    let said: Vec<String> = std::thread::scope(|scope| {
        let ask = |number: usize| {
            let (builder, recipe) = (&builders[number % 2], &recipe);
            scope.spawn(move || {
                let root = root_of(builder, recipe);
                fs_err::read_to_string(root.join("once")).expect("it reads")
            })
        };
        let asking: Vec<_> = (0..8).map(ask).collect();
        let said = asking.into_iter().map(|thread| thread.join());
        said.map(|said| said.expect("it ends")).collect()
    });
    let is_same = |text: &String| text.len() > 30 && *text == said[0];
    assert!(said.iter().all(is_same), "{said:?}");
    let root = root_of(&builders[0], &recipe);
    let net = fs_err::read_to_string(root.join("net")).expect("it reads");
    let interfaces = net
        .lines()
        .skip(2)
        .filter_map(|line| line.split(':').next());
    assert_eq!(interfaces.map(str::trim).collect::<Vec<_>>(), ["lo"]);
    let status = fs_err::metadata(&root).expect("it is there");
    let mode = status.permissions().mode();
    assert_eq!(mode & 0o777, 0o755, "whoever works in it gets in");
    // What an image is by itself, here one that is not to be had.
    let error = builders[0].image("localhost/none:1", None).unwrap_err();
    assert!(error.to_string().contains("localhost/none"), "{error}");
    assert_eq!(kept(&images).len(), 1);
}

/// Links of a context are links in the build, and lead nowhere out of it.
#[test]
fn a_context_has_nothing_but_itself() {
    if !has_buildah() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let secret = folder.path().join("secret");
    fs_err::write(&secret, "of this machine").expect("written");
    let copying = |copied: &str| {
        let text = format!("FROM scratch\nCOPY {copied} /usr/copied\n");
        let mut context = FileTree::of_file("Dockerfile", text).expect("a tree");
        let real = Entry::File {
            bytes: b"inside".to_vec(),
            executable: false,
        };
        context.insert("real", real).expect("it fits");
        for (path, target) in [("near", Path::new("real")), ("far", &secret)] {
            let target = target.to_owned();
            context
                .insert(path, Entry::Link { target })
                .expect("it fits");
        }
        Recipe {
            context,
            dockerfile: "Dockerfile".into(),
        }
    };
    let builder = open(&folder.path().join("images"), LONG, 1 << 30);
    let near = root_of(&builder, &copying("near"));
    let copied = fs_err::read_to_string(near.join("usr/copied")).expect("it reads");
    assert_eq!(copied, "inside");
    // The link was there, and was not followed to where it leads.
    let error = builder.build(&copying("far")).unwrap_err().to_string();
    assert!(
        error.contains("far") && !error.contains("of this machine"),
        "{error}"
    );
}

#[test]
fn what_is_too_large_too_long_or_wrong_leaves_nothing() {
    if !has_buildah() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let images = folder.path().join("images");
    let (much, little) = (1 << 30, 1 << 20);
    let short = Duration::from_secs(5);
    for (dockerfile, timeout, max_size, expected) in [
        ("RUN exit 7", LONG, much, "exit status 7"),
        ("", LONG, little, "`actor.image_build.max_size`"),
        ("RUN sleep 600", short, much, "`actor.image_build.timeout`"),
    ] {
        let builder = open(&images, timeout, max_size);
        let recipe = recipe(&format!("FROM scratch\nCOPY rootfs/ /\n{dockerfile}\n"));
        let error = builder.build(&recipe).unwrap_err();
        assert!(matches!(error, ActorError::Backend { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(kept(&images), [] as [PathBuf; 0]);
        assert!(!images.join("work").exists());
        assert_eq!(processes_naming(&images), [] as [String; 0]);
    }
    // What came before is in nobody's way.
    let builder = open(&images, LONG, much);
    root_of(&builder, &recipe("FROM scratch\nCOPY rootfs/ /\n"));
}

/// However a run ends in the middle of a build, nothing runs on and nothing half is kept.
#[test]
fn a_build_ends_with_its_run() {
    if !has_buildah() {
        return;
    }
    for (signal, code) in [("-TERM", Some(75)), ("-KILL", None)] {
        let folder = tempfile::tempdir().expect("a folder");
        let images = folder.path().join("images");
        // Nobody else sleeps for so long.
        let slow = format!("{GOOD}RUN sleep 65431\n");
        let task = BuiltTask {
            name: "slow",
            dockerfile: &slow,
            context: &root_filesystem,
        };
        let actor = actor(folder.path(), "runsc");
        let arguments = prepare(folder.path(), "run", &[task], COMMAND, &actor);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut process = wardian(folder.path(), &arguments)
            .spawn()
            .expect("it starts");
        let is_building = || {
            let found = crate::actor::processes_naming("65431");
            found.iter().any(|line| line.trim_end() == "sleep 65431")
        };
        wait("nothing is built", || {
            let ended = process.try_wait().expect("it is there");
            assert!(ended.is_none(), "it ended");
            is_building()
        });
        let number = process.id().to_string();
        let killed = Command::new("kill").args([signal, &number]).status();
        assert!(killed.expect("kill").success());
        let output = process.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), code, "{}", told(&output));
        wait("a build runs on", || {
            !is_building() && processes_naming(&images).is_empty()
        });
        assert_eq!(kept(&images), [] as [PathBuf; 0]);
        // The next one is not kept from anything.
        let builder = open(&images, LONG, 1 << 30);
        root_of(&builder, &recipe("FROM scratch\nCOPY rootfs/ /\n"));
        assert!(!images.join("work").exists());
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Without the key nothing is built.
#[test]
fn a_task_that_has_to_be_built_names_the_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let task = BuiltTask {
        name: "one",
        dockerfile: GOOD,
        context: &|_| (),
    };
    let output = train_on(folder.path(), "run", &[task], COMMAND, "backend = 'runsc'");
    assert_eq!(output.status.code(), Some(2));
    let told = told(&output);
    assert!(told.contains("`actor.image_build`"), "{told}");
    assert_clean(folder.path());
}
