//! Directories of LMCache's types that use NIXL: names, padding and keys.

use serde_json::json;

use super::*;
use kvtier_l2::{Registry, trailer::LEN as TRAILER};

const ALIGN: u64 = 4096;
/// Bytes of an object and its padding.
const PADDED: u64 = LEN.next_multiple_of(ALIGN);

fn padded(change: impl FnOnce(&mut FsOptions)) -> Fixture {
    Fixture::with(|options| {
        options.names = Naming::Nixl;
        change(options);
    })
}

/// Writes a file as LMCache does, whose padding is not zero: it is what was in its memory.
fn write_theirs(fixture: &Fixture, object: &ObjectSpec, len: u64) {
    let mut bytes = bytes(object);
    bytes.resize(len as usize, 0xa5);
    let path = fixture.path(object);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn padded_files_of_lmcache_are_loaded() {
    for (align, len) in [(ALIGN, PADDED), (512, 10_240), (1 << 16, 1 << 16)] {
        for direct in [false, true] {
            let fixture = padded(|options| {
                options.align_bytes = align;
                options.use_odirect = direct;
            });
            write_theirs(&fixture, &object(1), len);
            assert!(fixture.has(&object(1)));
            assert_eq!(fixture.load(&object(1)), Ok(false));
            assert_eq!(fixture.store(&object(1)), Ok(Stored::AlreadyThere(len)));
        }
    }
}

#[test]
fn other_lengths_are_misses_that_stores_replace() {
    for len in [0, LEN, PADDED - 1, PADDED + 1, PADDED + 2 * ALIGN] {
        let fixture = padded(|_| {});
        write_theirs(&fixture, &object(1), len);
        assert!(!fixture.has(&object(1)), "{len}");
        assert_eq!(fixture.store(&object(1)), Ok(Stored::Written(PADDED + 64)));
        assert_eq!(fixture.load(&object(1)), Ok(true));
        write_theirs(&fixture, &object(1), len);
        assert_eq!(fixture.load(&object(1)), Err(ErrorKind::Corrupt), "{len}");
    }
}

#[test]
fn written_files_are_padded_before_their_trailer() {
    for (direct, layout) in [(false, Layout::Flat), (true, Layout::Sharded)] {
        let fixture = padded(|options| {
            options.use_odirect = direct;
            options.layout = layout;
        });
        fixture.store(&object(0x0a)).unwrap();
        let hash = "0a".repeat(32);
        let name = format!("org--model_01010000_0_{hash}.bin");
        let path = match layout {
            Layout::Flat => name,
            Layout::Sharded => format!("0a/0a/{name}"),
        };
        assert_eq!(fixture.names(), [path.as_str()]);
        let found = std::fs::read(fixture.base().join(path)).unwrap();
        let (start, rest) = found.split_at(LEN as usize);
        assert!(start == bytes(&object(0x0a)));
        assert!(rest[..rest.len() - TRAILER].iter().all(|byte| *byte == 0));
        let end = if direct { BLOCK } else { TRAILER as u64 };
        assert_eq!(found.len() as u64, PADDED + end);
        assert_eq!(fixture.adapter.size_of(LEN), PADDED + end);
        assert_eq!(fixture.load(&object(0x0a)), Ok(true));
    }
}

const BLOCK: u64 = kvtier_l2::trailer::BLOCK;

#[test]
fn files_of_another_alignment_stay_until_replaced() {
    let small = padded(|_| {});
    small.store(&object(1)).unwrap();
    let large = padded(|options| {
        options.align_bytes = 1 << 16;
        options.base_path.clone_from(&small.options.base_path);
    });
    assert!(!large.has(&object(1)));
    assert_eq!(large.load(&object(1)), Err(ErrorKind::NotFound));
    assert_eq!(small.load(&object(1)), Ok(true));
    large.store(&object(1)).unwrap();
    assert_eq!(large.load(&object(1)), Ok(true));
    assert_eq!(small.load(&object(1)), Err(ErrorKind::NotFound));
    assert_eq!(
        large.status("quarantined_files") + small.status("quarantined_files"),
        0
    );
}

#[test]
fn objects_are_recovered_in_both_layouts() {
    let fixture = padded(|options| options.layout = Layout::Sharded);
    fixture.store(&object(1)).unwrap();
    let flat = padded(|options| options.base_path.clone_from(&fixture.options.base_path));
    write_theirs(&flat, &object(2), PADDED);
    let odd = ObjectSpec {
        key: key(3, "org--model", "tenant"),
        ..object(3)
    };
    fixture.store(&odd).unwrap();
    // Theirs in work, and what fs would write.
    let temporary = format!("{}.tmp.0123abcd", flat.path(&object(4)).display());
    std::fs::write(temporary, "part").unwrap();
    fixture.write_bare(&object(5), Naming::Grouped, 0);
    let (listed, recovered) = fixture.recover();
    let mut keys: Vec<_> = listed.into_iter().map(|found| found.key).collect();
    keys.sort();
    assert_eq!(keys, [object(1).key, object(2).key, odd.key.clone()]);
    assert_eq!((recovered.objects, recovered.foreign), (3, 2));
    for object in [object(1), object(2), odd] {
        assert!(fixture.has(&object));
        fixture.load(&object).unwrap();
    }
    assert!(!fixture.has(&object(5)));
}

#[test]
fn keys_of_lmcache_are_those_of_a_directory() {
    let parse = |spec| Registry::of(&[NIXL_STORE, NIXL_STORE_DYNAMIC, NIXL_NATIVE]).parse(&spec);
    let config = parse(json!({
        "type": "nixl_store_dynamic", "backend": "POSIX", "num_workers": 3,
        "backend_params": {"file_path": "/x/y", "use_direct_io": "True", "shard_dirs": true, "max_capacity_gb": "1.5"},
    }))
    .unwrap();
    let expected = FsOptions {
        names: Naming::Nixl,
        layout: Layout::Sharded,
        use_odirect: true,
        num_workers: 3,
        ..FsOptions::new("/x/y")
    };
    assert_eq!(FsOptions::of(&config), expected);
    assert_eq!(config.capacity_bytes(), Some(3 << 29));
    assert_eq!(config.warnings, [""; 0]);

    let config = parse(json!({
        "type": "nixl_native", "backend": "GDS_MT", "max_capacity_gb": 2,
        "backend_params": {"file_path": "/x", "threads": 8},
    }))
    .unwrap();
    let expected = FsOptions {
        nixl: NixlOptions {
            backend: "GDS_MT".into(),
            params: [("threads".into(), "8".into())].into(),
            ..NixlOptions::default()
        },
        ..FsOptions::new("/x")
    };
    assert_eq!(FsOptions::of(&config), expected);
    assert_eq!(config.capacity_bytes(), Some(2 << 30));
    assert_eq!(
        config.warnings,
        [
            "type \"nixl_native\": the backend of NIXL changes nothing without io_engine \"nixl\": objects are moved by \
             system calls",
            "type \"nixl_native\": the parameters of NIXL's backend change nothing without io_engine \"nixl\"",
        ]
    );

    let config = parse(json!({
        "type": "nixl_store", "backend": "POSIX", "pool_size": 1000, "layout": "sharded",
        "backend_params": {"file_path": "/x", "use_direct_io": "false", "file_size": "2097152"},
    }))
    .unwrap();
    let expected = FsOptions {
        layout: Layout::Sharded,
        ..FsOptions::new("/x")
    };
    assert_eq!(FsOptions::of(&config), expected);
    assert_eq!(config.capacity_bytes(), Some(1000 << 21));
    assert!(config.warnings[0].contains("are not exchanged"));
}

#[test]
fn mistakes_in_keys_of_lmcache_are_refused() {
    let refused = |kind: &str, change: serde_json::Value| {
        let mut spec =
            json!({"type": kind, "backend": "POSIX", "backend_params": {"file_path": "/x"}});
        for (key, value) in change.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let error = Registry::of(&[NIXL_STORE, NIXL_STORE_DYNAMIC, NIXL_NATIVE])
            .parse(&spec)
            .unwrap_err();
        error.to_string()
    };
    let dynamic = "nixl_store_dynamic";
    for (kind, change, words) in [
        (
            dynamic,
            json!({"backend": "OBJ"}),
            &["\"backend\"", "OBJ", "\"s3\""][..],
        ),
        (
            dynamic,
            json!({"backend": "posix"}),
            &["\"backend\"", "IBM_SCALE or POSIX"],
        ),
        (
            dynamic,
            json!({"backend": null}),
            &["\"backend\" is missing"],
        ),
        (
            dynamic,
            json!({"backend_params": {}}),
            &["backend_params", "\"file_path\""],
        ),
        (
            dynamic,
            json!({"backend_params": {"file_path": "~/x"}}),
            &["backend_params", "~/x", "written out"],
        ),
        (
            dynamic,
            json!({"backend_params": {"file_path": ["/x"]}}),
            &["backend_params", "an object of texts"],
        ),
        (
            dynamic,
            json!({"backend_params": {"file_path": "/x", "shard_dirs": "yes"}}),
            &["true or false as its \"shard_dirs\""],
        ),
        (
            dynamic,
            json!({"backend_params": {"file_path": "/x", "max_capacity_gb": "0"}}),
            &["as its \"max_capacity_gb\""],
        ),
        // It has another name here.
        (
            dynamic,
            json!({"base_path": "/y"}),
            &["\"base_path\" is unknown", "backend_params"],
        ),
        (dynamic, json!({"names": "0.5"}), &["\"names\" is unknown"]),
        (
            dynamic,
            json!({"align_bytes": 5000}),
            &["align_bytes", "5000", "a power of two"],
        ),
        ("nixl_store", json!({}), &["\"pool_size\" is missing"]),
        (
            "nixl_store",
            json!({"pool_size": 1, "backend_params": {"file_path": "/x", "file_size": "1"}}),
            &["from 4096 on as its \"file_size\""],
        ),
    ] {
        let line = refused(kind, change);
        for word in words {
            assert!(line.contains(word), "{word}: {line}");
        }
    }
}
