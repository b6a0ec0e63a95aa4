//! A run file as others may see it.

use toml::{Table, Value};

use crate::address::shown_in;

/// What stands in the place of a secret.
const HIDDEN: &str = "…";

/// Hides what a run file may hold of secrets: values of headers and of an agent's variables that are no `{NAME}`, and
/// users and passwords of addresses.
pub(crate) fn hide_secrets(table: &mut Table) {
    for (key, value) in table {
        match value {
            Value::Table(inner) if is_secret(key, inner) => {
                for (_, value) in inner.iter_mut() {
                    let is_open = value.as_str().is_some_and(is_reference);
                    if !is_open {
                        *value = Value::String(HIDDEN.to_owned());
                    }
                }
            }
            Value::Table(inner) => hide_secrets(inner),
            Value::String(text) => *text = shown_in(text),
            _ => {}
        }
    }
}

/// Whether a table is of headers or of variables: that of an environment elsewhere, which is called `env`, too, has its
/// address.
fn is_secret(key: &str, table: &Table) -> bool {
    key == "headers" || key == "env" && !table.contains_key("url")
}

/// Whether a value is that of a variable alone, which it names.
fn is_reference(value: &str) -> bool {
    value.starts_with('{') && value.ends_with('}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden_and_what_names_them_is_not() {
        let text = "seed = 1\n[env]\nurl = 'https://me:secret@example.org'\n[env.headers]\na = 'Bearer secret'\n\
                    b = '{TOKEN}'\n[environments.x.env]\nurl = 'http://h'\nheaders = { c = 'secret' }\n\
                    [rollout.agent]\ncommand = ['a']\nenv = { KEY = 'secret', N = 1 }\n";
        let mut table: Table = text.parse().unwrap();
        hide_secrets(&mut table);
        let shown = table.to_string();
        assert!(!shown.contains("secret"), "{shown}");
        assert_eq!(table["env"]["headers"]["b"].as_str(), Some("{TOKEN}"));
        assert_eq!(table["env"]["url"].as_str(), Some("https://…@example.org"));
        assert_eq!(table["seed"].as_integer(), Some(1));
    }
}
