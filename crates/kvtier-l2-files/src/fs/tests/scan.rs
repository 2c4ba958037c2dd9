//! Looking through a directory: recovery, listings, leftovers.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};

use super::*;

fn numbered(number: u32) -> ObjectSpec {
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&number.wrapping_mul(0x9e37_79b9).to_be_bytes());
    let key = ObjectKey::new(ChunkHash(hash), "org/model", 0x0101_0000, 0, "salt").unwrap();
    ObjectSpec {
        key,
        len: 10,
        layout: LAYOUT,
    }
}

fn filled(layout: Layout, count: u32) -> Fixture {
    let fixture = Fixture::with(|options| options.layout = layout);
    let items = (0..count).map(|number| {
        let object = numbered(number);
        let from = fixture.buffer(0, object.len);
        StoreItem { object, from }
    });
    let stored = block_on(fixture.adapter.store(items.collect()));
    assert!(stored.iter().all(Result::is_ok));
    fixture
}

fn age(path: &Path, by: Duration) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - by).unwrap();
}

#[test]
fn recovery_returns_size_and_time_per_object() {
    // More than a page of the scan, and few enough directories.
    for (layout, count) in [(Layout::Flat, 4500), (Layout::Sharded, 300)] {
        let fixture = filled(layout, count);
        let path = fixture.path(&numbered(7));
        let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_234_567_890);
        let times = fs::FileTimes::new().set_modified(then).set_accessed(then);
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_times(times)
            .unwrap();
        let (listed, recovered) = fixture.recover();
        let keys: BTreeSet<_> = listed.iter().map(|listed| listed.key.clone()).collect();
        let expected: BTreeSet<_> = (0..count).map(|number| numbered(number).key).collect();
        assert!(keys == expected && listed.len() == count as usize);
        assert!(listed.iter().all(|listed| listed.bytes == 74));
        assert_eq!(
            (recovered.objects, recovered.bytes),
            (u64::from(count), u64::from(count) * 74)
        );
        assert_eq!((recovered.removed, recovered.foreign), (0, 0));
        let seventh = listed
            .iter()
            .find(|listed| listed.key == numbered(7).key)
            .unwrap();
        assert_eq!(seventh.used_at, 1_234_567_890);
    }
}

#[test]
fn recovery_stops_on_request() {
    let fixture = filled(Layout::Flat, 4500);
    let seen = Mutex::new(0);
    let found = |page: Vec<Listed>| {
        *seen.lock() += page.len();
        false
    };
    let recovered = block_on(fixture.adapter.recover(&found)).unwrap();
    assert!((1..4500).contains(&*seen.lock()));
    assert_eq!(recovered.objects as usize, *seen.lock());
    // What was not seen is still found.
    assert_eq!(fixture.adapter.files.others.get(), (true, true));
}

#[test]
fn listings_come_in_pages_of_any_length() {
    for layout in [Layout::Flat, Layout::Sharded] {
        let fixture = filled(layout, 200);
        for limit in [3, 50, 200, usize::MAX] {
            let (mut listed, mut from, mut pages) = (Vec::new(), None, 0);
            loop {
                let page = block_on(fixture.adapter.list(from, limit)).unwrap();
                assert!(page.objects.len() <= limit);
                listed.extend(page.objects.into_iter().map(|object| object.key));
                pages += 1;
                from = page.next;
                if from.is_none() {
                    break;
                }
            }
            let unique: BTreeSet<_> = listed.iter().cloned().collect();
            assert_eq!(
                (listed.len(), unique.len()),
                (200, 200),
                "{layout:?} {limit}"
            );
            assert!(pages >= 200 / limit);
        }
    }
}

#[test]
fn listing_is_stable_under_concurrent_changes() {
    let fixture = filled(Layout::Flat, 400);
    let (mut listed, mut from, mut next) = (Vec::new(), None, 400);
    loop {
        let page = block_on(fixture.adapter.list(from, 10)).unwrap();
        listed.extend(page.objects.into_iter().map(|object| object.key));
        // Of the first half, one of ten goes; as many new ones come.
        let removed = (next - 400) % 200 / 10 * 10;
        block_on(fixture.adapter.delete(vec![numbered(removed).key]));
        let object = numbered(next + 10_000);
        let from_buffer = fixture.buffer(0, object.len);
        let item = StoreItem {
            object,
            from: from_buffer,
        };
        store_by(&fixture.adapter, item).unwrap();
        next += 10;
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    for number in (0..400).filter(|number| *number >= 200 || number % 10 != 0) {
        let times = listed
            .iter()
            .filter(|key| **key == numbered(number).key)
            .count();
        assert_eq!(times, 1, "{number}");
    }
}

#[test]
fn unknown_listing_positions_are_refused() {
    let fixture = filled(Layout::Flat, 3);
    for bad in [
        "",
        "x",
        ":",
        ":x",
        "zzzz:0",
        "10000:0",
        "1:-1",
        ":99999999999999999999999",
    ] {
        let refused = block_on(fixture.adapter.list(Some(bad.into()), 10)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Refused, "{bad}");
    }
    for odd in [
        ":9223372036854775807",
        ":18446744073709551615",
        "ffff:0",
        "ffff:77",
    ] {
        // Whatever the file system makes of it.
        let _ = block_on(fixture.adapter.list(Some(odd.into()), 10));
    }
}

#[test]
fn foreign_names_are_counted_and_kept() {
    let fixture = filled(Layout::Sharded, 10);
    let hash = "ab".repeat(32);
    let foreign = [
        "notes.txt".to_owned(),
        format!("m@0x01010000@0@{hash}.tmp"),
        format!("m@0x01010000@0@{}.data", &hash[2..]),
        format!("#{hash}.data"),
        // An object in the directory of another.
        format!("00/00/m@0x01010000@0@{hash}.data"),
    ];
    fs::create_dir_all(fixture.base().join("00/00")).unwrap();
    fs::create_dir(fixture.base().join("lost+found")).unwrap();
    for name in &foreign {
        fs::write(fixture.base().join(name), "theirs").unwrap();
    }
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe.data");
    fs::write(fixture.base().join(odd), "theirs").unwrap();
    let (listed, recovered) = fixture.recover();
    assert_eq!((listed.len(), recovered.foreign), (10, 7));
    for name in &foreign {
        assert_eq!(fs::read(fixture.base().join(name)).unwrap(), b"theirs");
    }
}

#[test]
fn leftovers_are_removed_and_files_in_progress_kept() {
    // The last are made where they belong.
    for (tmp, inside) in [("", ""), ("being/written", "being/written"), ("", "ab/cd")] {
        let fixture = Fixture::with(|options| options.relative_tmp_dir = tmp.into());
        let path = |name: &str| fixture.base().join(inside).join(name);
        fs::create_dir_all(path("")).unwrap();
        // Of a writer that ended: it holds no lock.
        fs::write(fixture.base().join(".kvtier-tmp-x1"), "").unwrap();
        fs::write(path(".kvtier-tmp-x1-0"), "part").unwrap();
        // Of a writer that lives.
        let lock = fs::File::create(fixture.base().join(".kvtier-tmp-x2")).unwrap();
        lock.try_lock().unwrap();
        fs::write(path(".kvtier-tmp-x2-0"), "part").unwrap();
        age(&path(".kvtier-tmp-x2-0"), Duration::from_secs(7200));
        // Of unknown writers: young and old.
        fs::write(path(".kvtier-tmp-x3-0"), "part").unwrap();
        fs::write(path(".kvtier-tmp-x4-0"), "part").unwrap();
        age(&path(".kvtier-tmp-x4-0"), Duration::from_secs(120));
        let (listed, recovered) = fixture.recover();
        assert_eq!((listed.len(), recovered.foreign), (0, 0));
        assert_eq!(recovered.removed, 3);
        let left = [".kvtier-tmp-x2-0", ".kvtier-tmp-x3-0"].map(|name| path(name).exists());
        assert_eq!(left, [true, true]);
        let names = names_in(fixture.base());
        assert_eq!(
            names.iter().filter(|name| name.contains("-tmp-x")).count(),
            3
        );
        // Nor is our own lock taken for a leftover.
        assert_eq!(names.len(), 4);
        fixture.store(&object(1)).unwrap();
    }
}
