use super::*;

#[test]
fn text_is_context_message_source_and_hint() {
    let failed = io::Error::other("disk on fire");
    let error = Error::io("it cannot be read", failed)
        .context("line 3")
        .context("--quota-file a")
        .hint("give another");
    assert_eq!(
        error.to_string(),
        "--quota-file a: line 3: it cannot be read: disk on fire; give another"
    );
    assert!(StdError::source(&error).is_none());
}

#[test]
fn invalid_value_names_field_value_and_allowed() {
    let error = Error::invalid("--port", 0, "give 1 to 65535");
    assert_eq!(
        error.to_string(),
        "--port: 0 is not allowed; give 1 to 65535"
    );
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn kind_of_system_error_is_kept_by_rewriting() {
    let error = Error::io("no port", io::ErrorKind::AddrInUse);
    let error = error.map_text(|text| text.replace("port", "address"));
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.to_string().starts_with("no address: "));
    assert_eq!(error.kind().label("store_failed"), "store_failed");
    assert_eq!(ErrorKind::NotHeld.label("store_failed"), "not_held");
}
