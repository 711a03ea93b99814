//! Pages are what was stored last, by every path.

mod common;

use common::*;
use terrace_far_memory::*;

#[test]
fn a_page_is_loaded_as_it_was_stored_last() {
    on_each_path(|node_path, client_path| {
        let node = node_over(node_path, MIB, |_| ());
        let client = client_of(&node, client_path, 1000);
        let mut page = [0; PAGE_BYTES];
        assert_eq!(client.load(3, &mut page), Err(PageError::NotStored(3)));
        for (version, number) in [(1, 3), (2, 999), (3, 0), (4, 3), (5, 3), (6, 999)] {
            client.store(number, &content(number, version)).expect("stored");
            client.load(number, &mut page).expect("loaded");
            assert!(page == content(number, version), "{number}");
        }
        assert_eq!(client.stored_pages(), 3);
        assert_eq!(node.status().free_pages, 253);
        assert_eq!(node.status().clients[0].pages, 3);
        client.invalidate(3).expect("invalidated");
        assert_eq!(client.load(3, &mut page), Err(PageError::NotStored(3)));
        assert_eq!(node.status().free_pages, 254);
        client.load(999, &mut page).expect("loaded");
        assert!(page == content(999, 6));
        client.store(3, &content(3, 7)).expect("stored");
        client.load(3, &mut page).expect("loaded");
        assert!(page == content(3, 7));
    });
}

#[test]
fn rounds_go_on_when_the_queues_have_wrapped() {
    on_each_path(|node_path, client_path| {
        let node = node_over(node_path, MIB, |_| ());
        let client = Client::connect(&ClientConfig { depth: 4, ..config_of(&node, client_path, 64) })
            .expect("a client");
        let mut page = [0; PAGE_BYTES];
        for round in 0..200u64 {
            let number = round % 64;
            client.store(number, &content(number, round)).expect("stored");
            client.load(number, &mut page).expect("loaded");
            assert!(page == content(number, round), "{round}");
            if round % 3 == 0 {
                client.invalidate(number).expect("invalidated");
            }
        }
        let status = node.status();
        assert_eq!(status.free_pages + client.stored_pages(), status.page_count);
    });
}

#[test]
fn many_operations_are_in_flight_and_those_of_a_page_are_in_order() {
    on_each_path(|node_path, client_path| {
        let node = node_over(node_path, MIB, |_| ());
        let client = client_of(&node, client_path, 64);
        let buffer = client.buffer(65).expect("a buffer");
        let (mut done, mut submitted) = (Vec::new(), 0);
        for index in 0..64 {
            buffer.write(index, &content(index as u64, 1)).expect("within the buffer");
        }
        let store = |page: u64| Request::Store { page, from: (buffer.clone(), page as usize), tag: page };
        submitted += client.submit((0..64).map(store)).expect("begun");
        while done.len() < submitted {
            client.poll(&mut done);
        }
        done.clear();
        // The load of page 7 comes after the store of new content, and before the invalidation.
        buffer.write(8, &content(7, 2)).expect("within the buffer");
        let requests = [
            Request::Store { page: 7, from: (buffer.clone(), 8), tag: 1 },
            Request::Load { page: 7, into: (buffer.clone(), 64), tag: 2 },
            Request::Invalidate { page: 7, tag: 3 },
            Request::Load { page: 7, into: (buffer.clone(), 63), tag: 4 },
        ];
        client.submit(requests).expect("begun");
        while done.len() < 4 {
            client.poll(&mut done);
        }
        let results: Vec<_> = done.iter().map(|end| (end.tag, end.result)).collect();
        assert_eq!(results, [(1, Ok(())), (2, Ok(())), (3, Ok(())), (4, Err(PageError::NotStored(7)))]);
        let mut page = [0; PAGE_BYTES];
        buffer.read(64, &mut page).expect("within the buffer");
        assert!(page == content(7, 2));
    });
}
