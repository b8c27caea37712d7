"""What is a partitioned graph on disk, and how is it written and opened?

A dataset directory, format version 1, of a homogeneous graph:

* ``manifest.json``: format, version, N, E, K, the partition book's offsets, node and edge attributes with dtypes
  and shapes, the number of classes, splits with their sizes per part, the workload that the order was computed for, the partition's
  quality, and size, checksums, dtype and shape of every file. Written last.
* ``indptr.npy`` int64 [N + 1] and ``indices.npy`` int32 (int64 where N >= 2**31) [E]: the whole topology in CSC form.
* ``original_id.npy`` int64 [N]: the user's id of every vertex.
* ``edge_<name>.npy`` [E, ...]: edge attributes, in the order of ``indices``.
* ``part-<p>/node_<name>.npy`` [n_p, ...]: rows of the part's vertices; ``part-<p>/split_<name>.npy`` int64: global
  ids of the part's seeds, ascending; ``part-<p>/vip.npy`` float32 [N]: what the part's batches need, by global id.

Version 2 has the same of every type of vertices and of edges, in files with a prefix that numbers the type, ``n0.`` and ``e0.``; names of types stand in the
manifest alone. Besides: rows of replicated types are stored once, whole, as ``n<i>.node_<name>.npy``; splits of edges as ``part-<p>/e<j>.split_<name>.npy``,
positions in the lists; and times of vertices, where lists ascend by them, as ``n<i>.time_<name>.npy`` [N]. Any version is read and written through one
:mod:`description <salientpp.store.directory.description>`, of which version 1 is the case of one type named None.

Version 3 is version 2 where rows of some attributes of vertices are stored narrower (:mod:`salientpp.store.narrow`): their files hold encoded rows, uint8
[n, W], and the attribute's entry says by ``stored_as`` in which format, and what was lost by it.

Vertices are renumbered: part p owns ``[offsets[p], offsets[p + 1])``, and inside a part ids descend by the part's own
VIP (with seeds), so a prefix of a part is its hottest rows. Plain ``.npy`` files without pickles, opened as memory
maps: ranks of one host share the page cache. A directory is written under a temporary name and renamed, so half a
directory is never taken for a whole one.

A copy for one host (:mod:`salientpp.store.directory.local_copy`) lacks the folders of parts that are not served there; its ``parts.json``
lists those that it has.

Checksums: SHA-256 of every file, and a quick CRC-32 of its size and of evenly spread blocks (all of it up to 4 MiB). Opening
checks the manifest (:mod:`salientpp.store.directory.manifest`), sizes, headers and the quick sums; ``verify='full'`` reads everything.
"""
