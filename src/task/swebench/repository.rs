//! How the tests of a repository are run, by its version.
//!
//! The commands are those of the official harness up to its version 4, which kept them in the
//! program; later ones keep them in the data set, as `eval_script`.

const PYTEST: &str = "pytest -rA";
const PIP: &str = "python -m pip install -e .";

/// The commands of a repository at a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Repository {
    command: &'static str,
    /// What installs it after a patch.
    pub(super) install: &'static str,
    variables: &'static [&'static str],
}

impl Repository {
    /// Returns the commands of a repository, `owner/name`.
    pub(super) fn of(repo: &str, version: &str) -> Option<Self> {
        let is_old = |before: (u32, u32)| number(version).is_some_and(|version| version < before);
        let plain = |command, install| Self {
            command,
            install,
            variables: &[],
        };
        Some(match repo {
            "astropy/astropy" => plain(
                if is_old((3, 0)) {
                    "pytest -rA -vv -o console_output_style=classic --tb=no"
                } else {
                    PYTEST
                },
                "python -m pip install -e .[test] --verbose",
            ),
            "django/django" => Self {
                command: if version == "1.9" {
                    "./tests/runtests.py --verbosity 2"
                } else {
                    "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
                },
                install: if is_old((3, 0)) {
                    "python setup.py install"
                } else {
                    PIP
                },
                // Before 4.0 the tests depend on the encoding of the terminal.
                variables: if is_old((4, 0)) {
                    &[
                        "export LANG=en_US.UTF-8",
                        "export LC_ALL=en_US.UTF-8",
                        "export PYTHONIOENCODING=utf8",
                        "export LANGUAGE=en_US:en",
                    ]
                } else {
                    &[]
                },
            },
            "matplotlib/matplotlib" => plain(
                PYTEST,
                if is_old((3, 0)) {
                    "python setup.py build; python setup.py install"
                } else if is_old((3, 8)) {
                    PIP
                } else {
                    "python -m pip install --no-build-isolation -e \".[dev]\""
                },
            ),
            "mwaskom/seaborn" => plain(
                "pytest --no-header -rA",
                if is_old((0, 12)) {
                    PIP
                } else {
                    "python -m pip install -e .[dev]"
                },
            ),
            "psf/requests" => plain(PYTEST, "python -m pip install ."),
            "pallets/flask" | "pydata/xarray" | "pylint-dev/pylint" | "pytest-dev/pytest" => {
                plain(PYTEST, PIP)
            }
            "marshmallow-code/marshmallow" => plain(PYTEST, "python -m pip install -e '.[dev]'"),
            "scikit-learn/scikit-learn" => plain(
                PYTEST,
                "python -m pip install -v --no-use-pep517 --no-build-isolation -e .",
            ),
            "sphinx-doc/sphinx" => plain(
                "tox --current-env -epy39 -v --",
                "python -m pip install -e .[test]",
            ),
            "sympy/sympy" => plain(
                "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
                PIP,
            ),
            _ => return None,
        })
    }

    /// Returns the command that runs some of the tests.
    pub(super) fn test_command(&self, directives: &[String]) -> String {
        let mut command = self.command.to_owned();
        for directive in directives {
            command.push(' ');
            command.push_str(&quote(directive));
        }
        command
    }

    /// Returns what makes the environment of the published images active.
    pub(super) fn environment(&self) -> Vec<String> {
        let activate = [
            "source /opt/miniconda3/bin/activate",
            "conda activate testbed",
        ];
        let commands = activate.iter().chain(self.variables);
        commands.map(|command| (*command).to_owned()).collect()
    }
}

/// Reads the first two numbers of a version.
fn number(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.strip_prefix('v').unwrap_or(version).split('.');
    let mut part = || parts.next()?.parse().ok();
    Some((part()?, part()?))
}

/// Returns what a file of tests is called by its runner: in Django a module.
pub(super) fn directive(repo: &str, path: &str) -> String {
    if repo != "django/django" {
        return path.to_owned();
    }
    let path = path.strip_suffix(".py").unwrap_or(path);
    path.strip_prefix("tests/")
        .unwrap_or(path)
        .replace('/', ".")
}

fn quote(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
    if word.bytes().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_follow_the_version() {
        let of = |repo, version| Repository::of(repo, version).unwrap();
        assert!(of("astropy/astropy", "1.3").command.contains("classic"));
        assert_eq!(of("astropy/astropy", "v5.3").command, PYTEST);
        assert_eq!(
            of("django/django", "1.9").command,
            "./tests/runtests.py --verbosity 2"
        );
        assert_eq!(of("django/django", "3.2").environment().len(), 6);
        assert_eq!(of("django/django", "4.0").environment().len(), 2);
        assert_eq!(Repository::of("a/b", "1.0"), None);
        let command = of("pallets/flask", "2.3").test_command(&["tests/a b.py".to_owned()]);
        assert_eq!(command, "pytest -rA 'tests/a b.py'");
    }

    #[test]
    fn django_names_modules() {
        let path = "tests/template_tests/test_engine.py";
        assert_eq!(
            directive("django/django", path),
            "template_tests.test_engine"
        );
        assert_eq!(directive("psf/requests", path), path);
    }
}
