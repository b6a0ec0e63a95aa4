//! Where `$ref` leads, and how a value is written among text.

use std::cell::{Cell, OnceCell};
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::is_keyword;

/// Most schemas that are looked at to tell what values one admits.
const MAX_VISITS: usize = 1000;

/// A whole schema, within which `$ref` reaches.
#[derive(Debug)]
pub(in crate::chat) struct Document<'a> {
    root: &'a Value,
    anchors: OnceCell<BTreeMap<&'a str, &'a Value>>,
}

/// How a value stands between marks that are no JSON, as in Qwen's elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::chat) enum Written<'a> {
    /// As it is: a string.
    Text {
        /// What it may be, if not anything.
        choices: Option<Vec<&'a str>>,
    },
    /// As JSON, of one of these kinds.
    Json(Kinds),
}

impl<'a> Document<'a> {
    pub(in crate::chat) fn new(root: &'a Value) -> Self {
        Self {
            root,
            anchors: OnceCell::new(),
        }
    }

    /// Returns what a `$ref` leads to: a pointer within the document, or an `$anchor`.
    pub(super) fn resolve(&self, reference: &str) -> Option<&'a Value> {
        let fragment = percent_decoded(reference.strip_prefix('#')?)?;
        if fragment.is_empty() || fragment.starts_with('/') {
            return self.root.pointer(&fragment);
        }
        let anchors = self.anchors.get_or_init(|| {
            let mut anchors = BTreeMap::new();
            find_anchors(self.root, &mut anchors);
            anchors
        });
        anchors.get(fragment.as_str()).copied()
    }

    /// Returns the keywords of the whole, behind a `$ref` if that is all it is.
    pub(in crate::chat) fn top(&self) -> Option<&'a Map<String, Value>> {
        let mut top = self.root;
        for _ in 0..16 {
            match top.get("$ref") {
                Some(reference) => top = self.resolve(reference.as_str()?)?,
                None => break,
            }
        }
        top.as_object()
    }

    /// Returns how values of a schema in the document are written among text. Who writes and who reads
    /// ask the same: strings that nothing restricts but a list of them stand as they are, and so does
    /// what may be anything. All else is JSON.
    pub(in crate::chat) fn written(&self, schema: &'a Value) -> Written<'a> {
        let admitted = self.admitted(schema, &Cell::new(MAX_VISITS));
        match (admitted.kinds, admitted.texts) {
            (Kinds::STRING, Texts::Any) => Written::Text { choices: None },
            (Kinds::STRING, Texts::Only(choices)) => Written::Text {
                choices: Some(choices.into_iter().collect()),
            },
            (Kinds::ALL, Texts::Any) if !admitted.is_restricted => Written::Text { choices: None },
            (kinds, _) => Written::Json(kinds),
        }
    }

    fn admitted(&self, schema: &'a Value, visits: &Cell<usize>) -> Admitted<'a> {
        let Some(left) = visits.get().checked_sub(1) else {
            return Admitted::UNKNOWN;
        };
        visits.set(left);
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Bool(false) => return Admitted::NONE,
            _ => return Admitted::ALL,
        };
        let mut admitted = Admitted::ALL;
        for (key, value) in fields.iter().filter(|(key, _)| is_keyword(key)) {
            let several = || value.as_array().map(Vec::as_slice).unwrap_or_default();
            let any = |schemas: &'a [Value]| {
                let schemas = schemas.iter().map(|schema| self.admitted(schema, visits));
                schemas.fold(Admitted::NONE, Admitted::or)
            };
            let more = match key.as_str() {
                "type" => Admitted::of_kinds(value),
                "const" => Admitted::of_values(std::slice::from_ref(value)),
                "enum" => Admitted::of_values(several()),
                "$ref" => match value.as_str().and_then(|text| self.resolve(text)) {
                    Some(target) => self.admitted(target, visits),
                    None => Admitted::UNKNOWN,
                },
                "anyOf" | "oneOf" => any(several()),
                "allOf" => several()
                    .iter()
                    .map(|schema| self.admitted(schema, visits))
                    .fold(Admitted::ALL, Admitted::and),
                // These say nothing of strings.
                "properties"
                | "patternProperties"
                | "additionalProperties"
                | "required"
                | "minProperties"
                | "maxProperties"
                | "items"
                | "prefixItems"
                | "additionalItems"
                | "minItems"
                | "maxItems"
                | "minimum"
                | "maximum"
                | "exclusiveMinimum"
                | "exclusiveMaximum"
                | "multipleOf" => Admitted::ALL,
                _ => Admitted::UNKNOWN,
            };
            admitted = admitted.and(more);
            admitted.is_restricted = true;
        }
        admitted
    }
}

fn find_anchors<'a>(value: &'a Value, anchors: &mut BTreeMap<&'a str, &'a Value>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| find_anchors(item, anchors)),
        Value::Object(fields) => {
            if let Some(Value::String(anchor)) = fields.get("$anchor") {
                anchors.entry(anchor).or_insert(value);
            }
            fields
                .values()
                .for_each(|field| find_anchors(field, anchors));
        }
        _ => {}
    }
}

/// Returns text with each `%XX` as the byte that it stands for.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            let digits = std::str::from_utf8(digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = after;
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// A set of JSON's kinds of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::chat) struct Kinds(u8);

impl Kinds {
    const NONE: Self = Self(0);
    const ALL: Self = Self(0b11_1111);
    pub(in crate::chat) const NULL: Self = Self(1);
    pub(in crate::chat) const BOOLEAN: Self = Self(1 << 1);
    const NUMBER: Self = Self(1 << 2);
    pub(in crate::chat) const STRING: Self = Self(1 << 3);
    const ARRAY: Self = Self(1 << 4);
    const OBJECT: Self = Self(1 << 5);

    fn named(name: &str) -> Self {
        match name {
            "null" => Self::NULL,
            "boolean" => Self::BOOLEAN,
            "number" | "integer" => Self::NUMBER,
            "string" => Self::STRING,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::NONE,
        }
    }

    /// Returns the kind of a value.
    pub(in crate::chat) fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// Returns whether all of `others` are among them.
    pub(in crate::chat) fn contain(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }
}

/// Which strings a schema admits.
#[derive(Debug, Clone)]
enum Texts<'a> {
    Any,
    Only(BTreeSet<&'a str>),
    /// Those that some keyword admits which is not looked at here.
    Some,
}

/// Which values a schema admits.
#[derive(Debug, Clone)]
struct Admitted<'a> {
    kinds: Kinds,
    texts: Texts<'a>,
    /// Whether the schema says anything at all.
    is_restricted: bool,
}

impl<'a> Admitted<'a> {
    const ALL: Self = Self::new(Kinds::ALL, Texts::Any);
    const NONE: Self = Self::new(Kinds::NONE, Texts::Any);
    const UNKNOWN: Self = Self::new(Kinds::ALL, Texts::Some);

    const fn new(kinds: Kinds, texts: Texts<'a>) -> Self {
        Self {
            kinds,
            texts,
            is_restricted: false,
        }
    }

    fn of_kinds(names: &Value) -> Self {
        let named = |name: &Value| name.as_str().map_or(Kinds::NONE, Kinds::named);
        let kinds = match names {
            Value::Array(names) => names
                .iter()
                .map(named)
                .fold(Kinds::NONE, |all, kind| Kinds(all.0 | kind.0)),
            name => named(name),
        };
        Self::new(kinds, Texts::Any)
    }

    fn of_values(values: &'a [Value]) -> Self {
        let kinds = values.iter().map(Kinds::of);
        let kinds = kinds.fold(Kinds::NONE, |all, kind| Kinds(all.0 | kind.0));
        let texts = values.iter().filter_map(Value::as_str).collect();
        Self::new(kinds, Texts::Only(texts))
    }

    fn and(mut self, other: Self) -> Self {
        self.kinds = Kinds(self.kinds.0 & other.kinds.0);
        self.texts = match (self.texts, other.texts) {
            (Texts::Some, _) | (_, Texts::Some) => Texts::Some,
            (Texts::Any, texts) | (texts, Texts::Any) => texts,
            (Texts::Only(mut texts), Texts::Only(others)) => {
                texts.retain(|text| others.contains(text));
                Texts::Only(texts)
            }
        };
        if let Texts::Only(texts) = &self.texts
            && texts.is_empty()
        {
            self.kinds = self.kinds.without(Kinds::STRING);
        }
        self.is_restricted |= other.is_restricted;
        self
    }

    fn or(mut self, other: Self) -> Self {
        let have_texts = [&self, &other].map(|part| part.kinds.contain(Kinds::STRING));
        self.texts = match (have_texts, self.texts, other.texts) {
            ([true, true], Texts::Only(mut texts), Texts::Only(others)) => {
                texts.extend(others);
                Texts::Only(texts)
            }
            ([true, true], Texts::Some, _) | ([true, true], _, Texts::Some) => Texts::Some,
            ([true, true], ..) => Texts::Any,
            ([_, false], texts, _) | (_, _, texts) => texts,
        };
        self.kinds = Kinds(self.kinds.0 | other.kinds.0);
        self.is_restricted |= other.is_restricted;
        self
    }
}
