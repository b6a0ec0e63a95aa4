use proptest::prelude::*;
use rstest::rstest;

use super::*;

const LIMIT: usize = 1 << 16;

/// The examples of CODEC.md, section 1.4.
#[rstest]
#[case(Value::None, &[0x4e])]
#[case(Value::Int(0), &[0x69, 0x01, 0x00])]
#[case(Value::Int(127), &[0x69, 0x01, 0x7f])]
#[case(Value::Int(128), &[0x69, 0x02, 0x80, 0x00])]
#[case(Value::Int(-1), &[0x69, 0x01, 0xff])]
#[case(Value::Int(-129), &[0x69, 0x02, 0x7f, 0xff])]
#[case(Value::text("é"), &[0x73, 0x02, 0xc3, 0xa9])]
#[case(
    Value::List(vec![Value::Int(1), Value::text("a")]),
    &[0x6c, 0x02, 0x69, 0x01, 0x01, 0x73, 0x01, 0x61]
)]
#[case(
    Value::Tuple(vec![Value::text("load"), Value::text("x=1")]),
    &[0x74, 0x02, 0x73, 0x04, 0x6c, 0x6f, 0x61, 0x64, 0x73, 0x03, 0x78, 0x3d, 0x31]
)]
fn the_documented_examples_hold(#[case] value: Value, #[case] bytes: &[u8]) {
    assert_eq!(value.encode(), bytes);
    assert_eq!(Value::decode(bytes, LIMIT), Ok(value));
}

#[rstest]
#[case(b"", CodecError::Truncated)]
#[case(b"s\x02a", CodecError::BadLength)]
#[case(b"NN", CodecError::TrailingBytes { extra: 1 })]
#[case(b"i\x00", CodecError::BadInteger)]
#[case(b"i\x09123456789", CodecError::BadInteger)]
#[case(b"s\x01\xff", CodecError::BadText)]
#[case(b"l\xff\xff\xff\xff\x0f", CodecError::BadLength)]
#[case(b"l\x80\x80\x80\x80\x80\x00", CodecError::BadLength)]
#[case(b"t\x02N", CodecError::BadLength)]
#[case(b"t\x02s\x01", CodecError::BadLength)]
#[case(b"d\x00", CodecError::UnexpectedTag { tag: b'd' })]
#[case(b"h\x00s\x01x", CodecError::UnexpectedTag { tag: b'h' })]
#[case(b"o\x00", CodecError::UnexpectedTag { tag: b'o' })]
#[case(b"a\x00", CodecError::UnexpectedTag { tag: b'a' })]
#[case(b"l\x02l\x00r\x01", CodecError::UnexpectedTag { tag: b'r' })]
#[case(b"v\x00", CodecError::UnexpectedTag { tag: b'v' })]
fn malformed_bytes_are_refused(#[case] bytes: &[u8], #[case] error: CodecError) {
    assert_eq!(Value::decode(bytes, LIMIT), Err(error));
}

#[test]
fn padded_lengths_are_accepted() {
    assert_eq!(
        Value::decode(b"s\x81\x80\x80\x80\x00a", LIMIT),
        Ok(Value::text("a"))
    );
}

#[test]
fn lone_surrogates_are_replaced() {
    let bytes = b"s\x05a\xed\xa0\x80b";
    assert_eq!(Value::decode(bytes, LIMIT), Ok(Value::text("a\u{fffd}b")));
}

#[test]
fn depth_is_bounded() {
    let nested = |depth: usize| {
        let mut bytes = b"l\x01".repeat(depth);
        bytes.push(b'N');
        bytes
    };
    Value::decode(&nested(MAX_DEPTH), LIMIT).unwrap();
    assert_eq!(
        Value::decode(&nested(MAX_DEPTH + 1), LIMIT),
        Err(CodecError::TooDeep)
    );
}

#[test]
fn size_is_bounded() {
    let error = Value::decode(&[b'N'; 11], 10).expect_err("too large");
    assert_eq!(
        error,
        CodecError::TooLarge {
            size: 11,
            limit: 10
        }
    );
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        any::<String>().prop_map(Value::Str),
    ];
    leaf.prop_recursive(4, 32, 8, |inner| {
        let members = prop::collection::vec(inner, 0..8);
        prop_oneof![
            members.clone().prop_map(Value::List),
            members.prop_map(Value::Tuple),
        ]
    })
}

proptest! {
    #[test]
    fn values_survive_the_wire(value in values()) {
        prop_assert_eq!(Value::decode(&value.encode(), LIMIT), Ok(value));
    }

    #[test]
    fn garbage_is_refused_or_read_but_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(value) = Value::decode(&bytes, LIMIT) {
            prop_assert!(value.encode().len() <= bytes.len());
        }
    }
}
